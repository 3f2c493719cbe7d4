"""Many small reshards as few large collectives: gradient sync and parameter gathering.

A collective over n ranks costs a latency α per call besides its bytes. So equal steps of many
tensors run as one call on a flat buffer. Tensor t contributes to the buffer

    all_reduce       t                       [numel]
    all_gather       t, to every rank        [numel]        -> [n, numel], joined along t's split
    reduce_scatter   cut(t)                  [n, numel/n]   -> [numel/n]
    all_to_all       cut(t) along target     [n, numel/n]   -> same, joined along t's source

with `cut` and `join` of `runtime/groups/group.py`. They keep each rank's part of each tensor
together, so every tensor's result equals that of a call of its own, strided splits included.
Rounds go through the tensors in list order, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autopar.placement import COLLECTIVES, PrimitiveKind, Split
from autopar.program import buckets, primitive_bytes
from autopar.runtime.collectives import apply_primitive
from autopar.runtime.groups import Group, cut, join

Step = tuple[PrimitiveKind, Group, tuple[Split, ...]]
BucketItem = tuple[Tensor, tuple[Step, ...]]


@torch.no_grad()
def bucketed_apply(items: Sequence[BucketItem], bucket_bytes: int) -> list[Tensor]:
    """Apply to each tensor its steps in order; equal collectives are fused.

    `bucket_bytes` bounds a call's size by NCCL's accounting (`CollectiveCall.size_bytes`); a
    larger tensor goes alone. Results have no autograd history, and are contiguous if any step was
    applied. Results of one all_reduce or reduce_scatter bucket are views of its buffer.
    """
    values = [tensor.detach() for tensor, _ in items]
    todo = [list(steps) for _, steps in items]
    for bucket in buckets([_calls(x, steps) for x, steps in items], bucket_bytes):
        kind, g, _, _ = bucket.key
        xs = [_local_steps(values[i], todo[i]) for i in bucket.members]
        splits_of = [todo[i].pop(0)[2] for i in bucket.members]
        for i, value in zip(bucket.members, _fused(kind, g, xs, splits_of), strict=True):
            values[i] = value
    return [_local_steps(value, steps) for value, steps in zip(values, todo, strict=True)]


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


def _local_steps(value: Tensor, steps: list[Step]) -> Tensor:
    """Pop the steps before the next collective from `steps`, and apply them."""
    while steps and steps[0][0] not in COLLECTIVES:
        kind, g, splits = steps.pop(0)
        value = apply_primitive(kind, value, g, splits)
    return value


def _fused(
    kind: PrimitiveKind, g: Group, xs: list[Tensor], splits_of: list[tuple[Split, ...]]
) -> list[Tensor]:
    """One collective for all of `xs`."""
    if len(xs) == 1:
        return [apply_primitive(kind, xs[0], g, splits_of[0])]
    rows = Split(0)
    match kind:
        case "all_reduce":
            flat = g.all_reduce(torch.cat([x.reshape(-1) for x in xs]))
            return _parts(flat, [x.shape for x in xs])
        case "all_gather":
            flat = g.all_gather(torch.cat([x.reshape(-1) for x in xs]), rows)
            stacks = _parts(flat.view(g.size, -1), [x.shape for x in xs])
            return [join(s, splits[0]) for s, splits in zip(stacks, splits_of, strict=True)]
        case "reduce_scatter":
            stacks = [cut(x, splits[0], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat = g.reduce_scatter(_side_by_side(stacks), rows)
            return _parts(flat[0], [s.shape[1:] for s in stacks])
        case "all_to_all":
            stacks = [cut(x, splits[1], g.size) for x, splits in zip(xs, splits_of, strict=True)]
            flat = g.all_to_all(_side_by_side(stacks), rows, rows)
            received = _parts(flat, [s.shape[1:] for s in stacks])
            return [join(s, splits[0]) for s, splits in zip(received, splits_of, strict=True)]
    raise AssertionError(f"{kind} is no collective")


def _side_by_side(stacks: list[Tensor]) -> Tensor:
    """Stacks [n, *piece] as one buffer [n, total]: each rank's part is one row."""
    return torch.cat([s.flatten(1) for s in stacks], dim=1)


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut the last dim of `flat` back into tensors of `shapes` (after a leading dim, if any)."""
    parts = flat.split([prod(shape) for shape in shapes], dim=-1)
    lead = flat.shape[:-1]
    return [p.reshape((*lead, *shape)) for p, shape in zip(parts, shapes, strict=True)]
