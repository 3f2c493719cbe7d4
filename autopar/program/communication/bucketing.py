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
# Gradient sync runs beside backward, and its last bucket after it. So where gradients are few they
# are cut into several buckets, not smaller than DDP's first one (`_DEFAULT_FIRST_BUCKET_BYTES`).
_N_BUCKETS, _LEAST_BUCKET_BYTES = 8, 2**20


def sync_bucket_bytes(gradient_bytes: int) -> int:
    """The size of the buckets in which gradients of so many bytes are reduced."""
    return min(BUCKET_BYTES, max(_LEAST_BUCKET_BYTES, gradient_bytes // _N_BUCKETS))


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Bucket(Generic[Key]):
    """One fused call: key, positions of its tensors, size by NCCL's accounting, and its round."""

    key: Key
    members: tuple[int, ...]
    size_bytes: int
    round: int = 0


def buckets(steps: Sequence[Sequence[tuple[Key, int]]], bucket_bytes: int) -> Iterator[Bucket[Key]]:
    """The fused calls in order; `steps[i]` has the (key, size_bytes) of tensor i's collectives."""
    for position in range(max((len(s) for s in steps), default=0)):
        pending: dict[Key, list[tuple[int, int]]] = {}
        for i, collectives in enumerate(steps):
            if position < len(collectives):
                key, size_bytes = collectives[position]
                pending.setdefault(key, []).append((i, size_bytes))
        for key, members in pending.items():
            yield from _cut(key, members, bucket_bytes, position)


def _cut(
    key: Key, members: Sequence[tuple[int, int]], bucket_bytes: int, position: int
) -> Iterator[Bucket[Key]]:
    filled: list[int] = []
    filled_bytes = 0
    for i, size_bytes in members:
        if filled and filled_bytes + size_bytes > bucket_bytes:
            yield Bucket(key, tuple(filled), filled_bytes, position)
            filled, filled_bytes = [], 0
        filled.append(i)
        filled_bytes += size_bytes
    yield Bucket(key, tuple(filled), filled_bytes, position)


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
