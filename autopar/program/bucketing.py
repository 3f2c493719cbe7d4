"""Bucketing: which collectives of many tensors run as one call.

Each call has a latency, so the parameter gathers and the gradient syncs of a step are fused. Every
tensor has a list of collectives to go through. Each *round* takes the next collective of every
tensor and groups them by key (kind, group, dtype), in the order of their first tensors. Each group
is cut, in tensor order, into buckets

    sum of size_bytes over a bucket <= bucket_bytes        (a larger tensor goes alone)

The runtime executes these buckets, and the cost model prices the same ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.placement import PrimitiveKind

# PyTorch DDP's default: torch.nn.parallel.DistributedDataParallel, bucket_cap_mb.
BUCKET_BYTES = 25 * 2**20

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Bucket(Generic[Key]):
    """One fused call: key, positions of its tensors, and size by NCCL's accounting."""

    key: Key
    members: tuple[int, ...]
    size_bytes: int


def buckets(steps: Sequence[Sequence[tuple[Key, int]]], bucket_bytes: int) -> Iterator[Bucket[Key]]:
    """The fused calls in order; `steps[i]` has the (key, size_bytes) of tensor i's collectives."""
    for position in range(max((len(s) for s in steps), default=0)):
        pending: dict[Key, list[tuple[int, int]]] = {}
        for i, collectives in enumerate(steps):
            if position < len(collectives):
                key, size_bytes = collectives[position]
                pending.setdefault(key, []).append((i, size_bytes))
        for key, members in pending.items():
            yield from _cut(key, members, bucket_bytes)


def _cut(key: Key, members: Sequence[tuple[int, int]], bucket_bytes: int) -> Iterator[Bucket[Key]]:
    filled: list[int] = []
    filled_bytes = 0
    for i, size_bytes in members:
        if filled and filled_bytes + size_bytes > bucket_bytes:
            yield Bucket(key, tuple(filled), filled_bytes)
            filled, filled_bytes = [], 0
        filled.append(i)
        filled_bytes += size_bytes
    yield Bucket(key, tuple(filled), filled_bytes)


def primitive_bytes(kind: PrimitiveKind, local_bytes: int, n_ranks: int) -> tuple[int, int]:
    """(size by NCCL's accounting, local bytes after it) of one primitive."""
    match kind:
        case "all_gather":
            return local_bytes * n_ranks, local_bytes * n_ranks
        case "reduce_scatter" | "slice":
            return local_bytes, local_bytes // n_ranks
        case "zero_pad":
            return local_bytes, local_bytes * n_ranks
        case _:
            return local_bytes, local_bytes
