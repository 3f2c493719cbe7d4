"""Gradients of tied parameters: every stage that uses one gets the sum over stages.

It runs after every stage has brought its own gradient to storage. Each stage sends its shards
to every other stage, each slice once, in the receiver's layout. Where several ranks hold copies
of a shard, the first of them receives it, and an all_reduce with zeros hands it to the others.
All ranks sum in stage order, so copies stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.program.communication import Slice, copy_axes, local_factors, tied_slices
from autopar.program.lines import Pipeline, Tie
from autopar.runtime.collectives.p2p import Messenger
from autopar.runtime.groups import Group, phase


@dataclass(frozen=True)
class _GradientExchange:
    """The slices of a gradient that this rank exchanges with another stage."""

    sent: tuple[Slice, ...]
    received: tuple[Slice, ...]


@dataclass(frozen=True)
class _Share:
    """This rank's part in one tie: its stage's name for the parameter, and one exchange per stage.

    `stages` is the order of summation, `shape` the shard's shape by factors, and `copies` the axes
    along which ranks hold the same shard.
    """

    name: str
    stages: tuple[int, ...]
    shape: tuple[int, ...]
    copies: tuple[int, ...]
    exchanges: Mapping[int, _GradientExchange]


class TiedGradients:
    """This rank's part in summing the gradients of tied parameters."""

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        messenger: Messenger,
        groups: Mapping[tuple[int, ...], Group],
    ) -> None:
        self.messenger, self.groups = messenger, groups
        self.stage = pipeline.stage_of(rank)
        self._shares = [
            _share(pipeline, tie, self.stage, rank)
            for tie in pipeline.ties
            if self.stage in dict(tie.places)
        ]

    def detach_earlier(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Detach the gradients of earlier steps, which are sums already; returns them by name."""
        kept: dict[str, Tensor | None] = {}
        for share in self._shares:
            parameter = stored[share.name]
            kept[share.name], parameter.grad = parameter.grad, None
        return kept

    @torch.no_grad()
    def sum(self, stored: Mapping[str, Tensor], kept: Mapping[str, Tensor | None]) -> None:
        """Replace this step's gradients by their sums, and add those of earlier steps."""
        with phase("grad_sync"):
            for share in self._shares:
                parameter = stored[share.name]
                if not parameter.requires_grad:
                    continue
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = self._total(share, own.detach())
                earlier = kept[share.name]
                parameter.grad = total if earlier is None else earlier + total

    def _total(self, share: _Share, own: Tensor) -> Tensor:
        parts = {
            other: self._exchange(share, exchange, own)
            for other, exchange in share.exchanges.items()
        }
        parts[self.stage] = own
        first, *rest = (parts[stage] for stage in share.stages)
        total = first.clone()
        for part in rest:
            total += part
        return total

    def _exchange(self, share: _Share, exchange: _GradientExchange, own: Tensor) -> Tensor:
        """Send this stage's gradient; returns the other stage's, in this stage's layout."""
        seen = own.reshape(share.shape)
        posted = self.messenger.post(
            [(seen[s.source].contiguous(), s.target_rank) for s in exchange.sent],
            [(s.shape, own.dtype, s.source_rank) for s in exchange.received],
            "grad_sync",
        )
        out = own.new_zeros(share.shape)
        pace = self.messenger.context.flight.pace
        with pace.waiting():
            received = posted.wait_received()
        for s, piece in zip(exchange.received, received, strict=True):
            out[s.target] = piece
        with pace.waiting():
            posted.wait_sent()
        whole = out.view(own.shape)
        return self.groups[share.copies].all_reduce(whole) if share.copies else whole


def _share(pipeline: Pipeline, tie: Tie, stage: int, rank: int) -> _Share:
    """A rank's part in one tie; exchanges are in stage order, so ranks cannot wait in a cycle."""
    name, mesh = dict(tie.places)[stage], pipeline.meshes[stage]
    parameter = pipeline.parameter(stage, name)
    exchanges = {}
    for other, _ in tie.places:
        if other != stage:
            sent = tied_slices(pipeline, tie, stage, other)
            received = tied_slices(pipeline, tie, other, stage)
            exchanges[other] = _GradientExchange(
                tuple(s for s in sent if s.source_rank == rank),
                tuple(s for s in received if s.target_rank == rank),
            )
    return _Share(
        name,
        tuple(k for k, _ in tie.places),
        local_factors(parameter.dims, parameter.stored.spec, mesh.sizes),
        copy_axes(parameter, mesh),
        exchanges,
    )
