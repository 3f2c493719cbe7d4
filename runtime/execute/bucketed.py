"""Many small reshards as few large collectives: gradient sync and parameter gathering.

Equal steps of many tensors run as one call (`start_fused`). Rounds go through the tensors in list
order, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.placement import COLLECTIVES, PrimitiveKind, Split
from autopar.program.communication import buckets, primitive_bytes
from autopar.runtime.collectives import apply_primitive, start_fused
from autopar.runtime.groups import Group, Pending

Step = tuple[PrimitiveKind, Group, tuple[Split, ...]]
BucketItem = tuple[Tensor, tuple[Step, ...]]


@dataclass
class Chain:
    """A tensor on its way: `value` is None while a collective has it, `steps` are still to do."""

    value: Tensor | None
    steps: list[Step]

    def run_local(self) -> Tensor:
        """Run the steps before the next collective."""
        assert self.value is not None, "the tensor is under way"
        while self.steps and self.steps[0][0] not in COLLECTIVES:
            kind, g, splits = self.steps.pop(0)
            self.value = apply_primitive(kind, self.value, g, splits)
        return self.value


def bucketed_apply(items: Sequence[BucketItem], bucket_bytes: int) -> list[Tensor]:
    """Apply to each tensor its steps in order; equal collectives are fused.

    `bucket_bytes` bounds a call's size by NCCL's accounting (`CollectiveCall.size_bytes`); a
    larger tensor goes alone. Results have no autograd history, and are contiguous if any step was
    applied. Results of one all_reduce or reduce_scatter bucket are views of its buffer.
    """
    chains = [Chain(tensor.detach(), list(steps)) for tensor, steps in items]
    for bucket in buckets([_calls(x, steps) for x, steps in items], bucket_bytes):
        start_bucket([chains[i] for i in bucket.members]).wait()
    return [chain.run_local() for chain in chains]


def start_bucket(chains: Sequence[Chain], owns: bool = False) -> Pending[None]:
    """Begin the next collective of these tensors as one call; the wait gives them its results.

    They must have the same collective next, over one group, in one dtype. With `owns` nobody else
    reads them.
    """
    xs = [chain.run_local() for chain in chains]
    kind, g, _ = chains[0].steps[0]
    splits_of = [chain.steps.pop(0)[2] for chain in chains]
    for chain in chains:
        chain.value = None
    pending = start_fused(kind, g, xs, splits_of, owns)

    def arrived(values: list[Tensor]) -> None:
        for chain, value in zip(chains, values, strict=True):
            chain.value = value

    return pending.then(arrived)


_Key = tuple[PrimitiveKind, Group, torch.dtype, torch.device]


def _calls(x: Tensor, steps: Sequence[Step]) -> list[tuple[_Key, int]]:
    """The collectives a tensor goes through, and its size in bytes in each."""
    calls: list[tuple[_Key, int]] = []
    local_bytes = x.nbytes
    for kind, g, _ in steps:
        size_bytes, local_bytes = primitive_bytes(kind, local_bytes, g.size)
        if kind in COLLECTIVES:
            calls.append(((kind, g, x.dtype, x.device), size_bytes))
    return calls
