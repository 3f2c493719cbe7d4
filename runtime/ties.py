"""Gradients of parameters that several stages use: all of them get the sum.

Every stage has brought its own gradient to storage. Each sends its shards to every other
stage, in that one's layout, each slice once; where copies of a shard are held, the first rank
gets it and an all_reduce with zeros gives it to the others. All sum in the order of stages, so
the copies stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.cross_mesh import local_factors
from autopar.messages import copy_axes, tied_slices
from autopar.pipeline import Pipeline, Tie
from autopar.runtime.groups import Group, phase
from autopar.runtime.p2p import Messenger


class TiedGradients:
    """This rank's part in summing the gradients of tied parameters."""

    def __init__(
        self,
        pipeline: Pipeline,
        rank: int,
        messenger: Messenger,
        groups: Mapping[tuple[int, ...], Group],
    ) -> None:
        self.pipeline, self.rank, self.messenger, self.groups = pipeline, rank, messenger, groups
        self.stage = pipeline.stage_of(rank)
        self.ties = [t for t in pipeline.ties if any(s == self.stage for s, _ in t.places)]

    def set_aside(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Take the gradients of earlier steps off, which are sums already."""
        kept: dict[str, Tensor | None] = {}
        for tie in self.ties:
            name = dict(tie.places)[self.stage]
            kept[name], stored[name].grad = stored[name].grad, None
        return kept

    @torch.no_grad()
    def sum(self, stored: Mapping[str, Tensor], kept: Mapping[str, Tensor | None]) -> None:
        """Replace this step's gradients by their sums, and add those of earlier steps."""
        with phase("grad_sync"):
            for tie in self.ties:
                name = dict(tie.places)[self.stage]
                parameter = stored[name]
                if not parameter.requires_grad:
                    continue
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = self._total(tie, own.detach())
                earlier = kept[name]
                parameter.grad = total if earlier is None else earlier + total

    def _total(self, tie: Tie, own: Tensor) -> Tensor:
        parts: dict[int, Tensor] = {self.stage: own}
        for other, _ in tie.places:
            if other != self.stage:
                parts[other] = self._exchange(tie, other, own)
        first, *rest = (parts[stage] for stage, _ in tie.places)
        total = first.clone()
        for part in rest:
            total += part
        return total

    def _exchange(self, tie: Tie, other: int, own: Tensor) -> Tensor:
        """Give the other stage this one's gradient, and return theirs in this one's layout."""
        outward = tied_slices(self.pipeline, tie, self.stage, other)
        inward = tied_slices(self.pipeline, tie, other, self.stage)
        mine = self.pipeline.parameter(self.stage, dict(tie.places)[self.stage])
        here = self.pipeline.meshes[self.stage]
        shape = local_factors(mine.dims, mine.stored.spec, here.sizes)
        seen = own.reshape(shape)
        sends = [
            (seen[s.source].contiguous(), s.target_rank)
            for s in outward
            if s.source_rank == self.rank
        ]
        wanted = [s for s in inward if s.target_rank == self.rank]
        posted = self.messenger.post(
            sends, [(s.shape, own.dtype, s.source_rank) for s in wanted], "grad_sync"
        )
        out = own.new_zeros(shape)
        for s, piece in zip(wanted, posted.wait_received(), strict=True):
            out[s.target] = piece
        posted.wait_sent()
        copies = copy_axes(mine, here)
        whole = out.view(own.shape)
        return self.groups[copies].all_reduce(whole) if copies else whole
