"""Bucketing: which collectives of many tensors run as one call.

A collective costs a latency per call besides its bytes, so parameter gathers and gradient
syncs of a step are fused. Every tensor has a list of collectives to go through; in each
*round* the next ones are grouped by key (kind, group, dtype), groups in the order of their
first tensor, and each group is cut, in tensor order, into buckets

    sum of size_bytes over a bucket <= bucket_bytes        (a larger tensor goes alone)

The runtime executes these buckets and the cost model prices them: one rule for both.
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
    """One call: its key, the positions of its tensors, and its size by NCCL's accounting."""

    key: Key
    members: tuple[int, ...]
    size_bytes: int


def buckets(steps: Sequence[Sequence[tuple[Key, int]]], bucket_bytes: int) -> Iterator[Bucket[Key]]:
    """The calls, in order; `steps[i]` are the (key, size_bytes) tensor i goes through."""
    for position in range(max((len(s) for s in steps), default=0)):
        pending: dict[Key, list[tuple[int, int]]] = {}
        for i, wanted in enumerate(steps):
            if position < len(wanted):
                key, size_bytes = wanted[position]
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
    """(size by NCCL's accounting, local bytes afterwards) of one primitive."""
    match kind:
        case "all_gather":
            return local_bytes * n_ranks, local_bytes * n_ranks
        case "reduce_scatter" | "slice":
            return local_bytes, local_bytes // n_ranks
        case "zero_pad":
            return local_bytes, local_bytes * n_ranks
        case _:
            return local_bytes, local_bytes
