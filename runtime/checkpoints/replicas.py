"""Do ranks that hold the same values still hold the same bits?

Ranks with equal shards of a parameter take equal steps on equal gradients, so they stay bit-equal.
A batch, a learning rate or a memory fault of one rank breaks that, and nothing else shows it.

    every rank    a hash of each shard, by parameter and place, and of each buffer that steps change
    together      ranks whose hashes of the same part differ: `DivergenceError`

A parameter that several stages use is compared under its owner's name. What one rank holds alone is
not read.

The hash of a tensor is that of two sums over its 64-bit words, seen as rows of 4,096: the sum of
each row, and the sum of each column, mod 2^64. One changed bit changes both; two values that change
places change at least one. They are made where the tensor is, at the speed of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from autopar.errors import DivergenceError
from autopar.program.lines import StoredParameter
from autopar.runtime.checkpoints.contents import ModuleState, part_of
from autopar.runtime.groups import current_context
from autopar.runtime.state import StageState, gathered
from autopar.runtime.storage import as_bytes, bytes_of
from autopar.runtime.tensors import Box

_MOST_SHOWN = 5
_ROW_BYTES = 4096 * 8


def check_replicas(state: ModuleState) -> None:
    """Raise `DivergenceError` on every rank if replicas differ; all ranks must call it.

    It names the parameters, the ranks and their hashes. It reads what is replicated twice.
    """
    every: list[dict[str, str]] = gathered(dict(_hashes(state)))
    found = []
    for key in dict.fromkeys(key for of_rank in every for key in of_rank):
        first, *others = (rank for rank, of_rank in enumerate(every) if key in of_rank)
        for rank in others:
            if every[rank][key] != every[first][key]:
                found.append(
                    f"{key}: rank {first} has {every[first][key]}, rank {rank} has "
                    f"{every[rank][key]}"
                )
    if found:
        shown = found[:_MOST_SHOWN]
        if len(found) > len(shown):
            shown.append(f"and {len(found) - len(shown)} more")
        raise DivergenceError(
            "\n  ".join(["ranks that should hold the same bits differ:", *shown]),
            hint="compare the batches, learning rates and hooks of these ranks; then load the last "
            "checkpoint, which gives all of them one value",
        )


def fingerprint(*values: Tensor) -> str:
    """The hash of the tensors' bits in row-major order; shapes and dtypes are not part of it."""
    digest = blake2b(digest_size=8)
    for value in values:
        flat = as_bytes(value)
        if flat.storage_offset() % 8:
            flat = flat.clone()  # words begin at multiples of their size
        n_whole = len(flat) - len(flat) % _ROW_BYTES
        words = flat[:n_whole].view(torch.int64).view(-1, _ROW_BYTES // 8)
        for part in (words.sum(1), words.sum(0), flat[n_whole:]):
            digest.update(bytes_of(part))
    return digest.hexdigest()


def _hashes(state: ModuleState) -> Iterator[tuple[str, str]]:
    """(what it is a hash of, hash) of all that this rank shares with others."""
    place = state.place
    for p in place.parameters:
        if _is_alone(place, p):
            continue
        part = part_of(place, p, state.locals_[p.name])
        current_context().flight.progress(f"comparing `{p.name}`")
        found = fingerprint(*(piece.value for piece in part.pieces))
        at = "" if len(part.boxes) == 1 and part.boxes[0].sizes == part.shape else _text(part.boxes)
        yield f"`{p.mirror_of or p.name}`{at}", found
    for buffer in place.changed:
        if buffer.name in state.buffers:
            yield f"`{buffer.name}`", fingerprint(state.buffers[buffer.name])


def _is_alone(place: StageState, p: StoredParameter) -> bool:
    """Whether no other rank has this rank's shard."""
    ties = {q.mirror_of for program in place.pipeline.stages for q in program.parameters}
    placements = zip(p.stored.spec.placements, place.sizes, strict=True)
    return (
        p.mirror_of is None
        and p.name not in ties
        and all(placement.is_shard or n_ranks == 1 for placement, n_ranks in placements)
    )


def _text(boxes: Sequence[Box]) -> str:
    """Where a shard lies, as `[0:4, 8:16]`; of several boxes, all."""
    ends = (zip(box.start, box.sizes, strict=True) for box in boxes)
    return "".join(f"[{', '.join(f'{a}:{a + n}' for a, n in box)}]" for box in ends)
