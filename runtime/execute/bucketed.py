"""Many small reshards as few large collectives: gradient sync and parameter gathering.

A collective over n ranks costs a latency α per call besides its bytes. So equal steps of many
tensors run as one call on a flat buffer. Tensor t contributes to the buffer

    all_reduce       t                       [numel]
    all_gather       t, to every rank        [numel]        -> [n, numel], joined along t's split
    reduce_scatter   cut(t)                  [n, numel/n]   -> [numel/n]
    all_to_all       cut(t) along target     [n, numel/n]   -> same, joined along t's source

with `cut` and `join` of `runtime/groups/group.py`. They keep each rank's part of each tensor
together, so every tensor's result equals that of a call of its own, strided splits included.
Rounds go through the tensors in list order, which must be the same on all ranks. The order of a
buffer is fixed, too, so sums do not depend on what is ready first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from autopar.placement import COLLECTIVES, PrimitiveKind, Split
from autopar.program import buckets, primitive_bytes
from autopar.runtime.collectives import apply_primitive
from autopar.runtime.groups import Group, Pending, cut, join

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


@torch.no_grad()
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


@torch.no_grad()
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
    pending = _fused(kind, g, xs, splits_of, owns)

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


def _fused(
    kind: PrimitiveKind,
    g: Group,
    xs: list[Tensor],
    splits_of: list[tuple[Split, ...]],
    owns: bool,
) -> Pending[list[Tensor]]:
    """One collective for all of `xs`, begun; empties the list. A tensor alone is not copied."""
    if len(xs) == 1:
        return g.start(kind, xs.pop(), splits_of[0], owns).then(lambda value: [value])
    rows = Split(0)
    shapes = [x.shape for x in xs]
    match kind:
        case "all_reduce" | "all_gather":
            flat = torch.cat([x.reshape(-1) for x in xs])
            xs.clear()
            if kind == "all_reduce":
                return g.start(kind, flat, owns=True).then(lambda total: _parts(total, shapes))
            return g.start(kind, flat, [rows]).then(
                lambda whole: _joined(_parts(whole.view(g.size, -1), shapes), splits_of)
            )
        case "reduce_scatter":
            stacks = [cut(x, splits[0], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat, pieces = _side_by_side(stacks), [s.shape[1:] for s in stacks]
            xs.clear()
            return g.start(kind, flat, [rows]).then(lambda mine: _parts(mine[0], pieces))
        case "all_to_all":
            stacks = [cut(x, splits[1], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat, pieces = _side_by_side(stacks), [s.shape[1:] for s in stacks]
            xs.clear()
            return g.start(kind, flat, [rows, rows]).then(
                lambda received: _joined(_parts(received, pieces), splits_of)
            )
    raise AssertionError(f"{kind} is no collective")


def _joined(stacks: list[Tensor], splits_of: list[tuple[Split, ...]]) -> list[Tensor]:
    return [join(stack, splits[0]) for stack, splits in zip(stacks, splits_of, strict=True)]


def _side_by_side(stacks: list[Tensor]) -> Tensor:
    """Stacks [n, *piece] as one buffer [n, total]: each rank's part is one row."""
    return torch.cat([s.flatten(1) for s in stacks], dim=1)


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut the last dim of `flat` back into tensors of `shapes` (after a leading dim, if any)."""
    parts = flat.split([prod(shape) for shape in shapes], dim=-1)
    lead = flat.shape[:-1]
    return [p.reshape((*lead, *shape)) for p, shape in zip(parts, shapes, strict=True)]
