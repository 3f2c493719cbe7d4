"""Gradients of tied parameters: every stage that uses one gets the sum over stages.

It runs after every stage has brought its own gradient to storage. Each stage sends its shards
to every other stage, each slice once, in the receiver's layout. Where several ranks hold copies
of a shard, the first of them receives it, and an all_reduce with zeros hands it to the others.
All ranks sum in stage order, so copies stay bit-equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.program.communication import Slice, copy_axes, local_factors, tied_slices
from autopar.program.lines import Pipeline, Tie
from autopar.runtime.collectives.p2p import Messenger
from autopar.runtime.groups import Group, phase


@dataclass(frozen=True)
class _Share:
    """This rank's part in one tie as one of its stages: the parameter, as that stage stores it.

    `stages` is the order of summation, `shape` the shard's shape by factors, and `copies` the axes
    along which ranks hold the same shard.
    """

    stage: int
    name: str
    stages: tuple[int, ...]
    shape: tuple[int, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True)
class _HalfExchange:
    """The slices that stage `source` sends to stage `target`, of which this rank has an end."""

    source: int
    target: int
    slices: tuple[Slice, ...]


class TiedGradients:
    """This rank's part in summing the gradients of tied parameters.

    Every two stages of a tie exchange their gradients, in one order on all ranks, so ranks cannot
    wait in a cycle. Of two stages of one rank nothing is sent.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        messenger: Messenger,
        groups: Mapping[tuple[int, ...], Group],
    ) -> None:
        self.rank, self.messenger, self.groups = rank, messenger, groups
        self._shares: list[list[_Share]] = []
        self._exchanges: list[list[tuple[_HalfExchange, _HalfExchange]]] = []
        own = pipeline.stages_of(rank)
        for tie in pipeline.ties:
            names = dict(tie.places)
            self._shares.append([_share(pipeline, tie, k) for k in own if k in names])
            self._exchanges.append(
                [
                    (
                        _half_exchange(pipeline, tie, a, b, rank),
                        _half_exchange(pipeline, tie, b, a, rank),
                    )
                    for a, b in itertools.combinations(names, 2)
                    if a in own or b in own
                ]
            )

    def detach_earlier(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Detach the gradients of earlier steps, which are sums already; returns them by name."""
        kept: dict[str, Tensor | None] = {}
        for share in itertools.chain.from_iterable(self._shares):
            parameter = stored[share.name]
            kept[share.name], parameter.grad = parameter.grad, None
        return kept

    @torch.no_grad()
    def sum(self, stored: Mapping[str, Tensor], kept: Mapping[str, Tensor | None]) -> None:
        """Replace this step's gradients by their sums, and add those of earlier steps."""
        with phase("grad_sync"):
            for shares, exchanges in zip(self._shares, self._exchanges, strict=True):
                if not all(stored[share.name].requires_grad for share in shares):
                    continue
                totals = self._totals({share.stage: share for share in shares}, exchanges, stored)
                for share in shares:
                    total, earlier = totals[share.stage], kept[share.name]
                    stored[share.name].grad = total if earlier is None else earlier + total

    def _totals(
        self,
        shares: Mapping[int, _Share],
        exchanges: Sequence[tuple[_HalfExchange, _HalfExchange]],
        stored: Mapping[str, Tensor],
    ) -> dict[int, Tensor]:
        """The sum over all stages, in the layout of each stage of this rank."""
        # (stage, stage whose layout it has) -> gradient
        own = {stage: _gradient(stored[share.name]) for stage, share in shares.items()}
        parts = {(stage, stage): gradient for stage, gradient in own.items()}
        for both in exchanges:
            parts |= self._exchange(shares, both, own)
        totals = {}
        for stage, share in shares.items():
            first, *rest = (parts[other, stage] for other in share.stages)
            totals[stage] = first.clone()
            for part in rest:
                totals[stage] += part
        return totals

    def _exchange(
        self,
        shares: Mapping[int, _Share],
        both: Sequence[_HalfExchange],
        own: Mapping[int, Tensor],
    ) -> dict[tuple[int, int], Tensor]:
        """Exchange the gradients of two stages; returns what stages of this rank get."""
        cut = {
            half.source: own[half.source].reshape(shares[half.source].shape)
            for half in both
            if half.source in shares
        }
        sends, receives = [], []
        for half in both:
            for s in half.slices:
                if s.source_rank == self.rank != s.target_rank:
                    sends.append((cut[half.source][s.source].contiguous(), s.target_rank))
                elif s.target_rank == self.rank != s.source_rank:
                    dtype = own[half.target].dtype
                    receives.append((s.shape, dtype, s.source_rank))
        posted = self.messenger.post(sends, receives, "grad_sync")
        pace = self.messenger.context.flight.pace
        with pace.waiting():
            received = iter(posted.wait_received())
        found = {}
        for half in both:
            if half.target not in shares:
                continue
            share = shares[half.target]
            out = own[half.target].new_zeros(share.shape)
            for s in half.slices:
                if s.target_rank == self.rank:
                    is_here = s.source_rank == self.rank
                    out[s.target] = cut[half.source][s.source] if is_here else next(received)
            whole = out.view(own[half.target].shape)
            if share.copies:
                whole = self.groups[share.copies].all_reduce(whole)
            found[half.source, half.target] = whole
        with pace.waiting():
            posted.wait_sent()
        return found


def _gradient(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach()


def _half_exchange(
    pipeline: Pipeline, tie: Tie, source: int, target: int, rank: int
) -> _HalfExchange:
    slices = tied_slices(pipeline, tie, source, target)
    own = tuple(s for s in slices if rank in (s.source_rank, s.target_rank))
    return _HalfExchange(source, target, own)


def _share(pipeline: Pipeline, tie: Tie, stage: int) -> _Share:
    name, mesh = dict(tie.places)[stage], pipeline.meshes[stage]
    parameter = pipeline.parameter(stage, name)
    return _Share(
        stage,
        name,
        tuple(k for k, _ in tie.places),
        local_factors(parameter.dims, parameter.stored.spec, mesh.sizes),
        copy_axes(parameter, mesh),
    )
