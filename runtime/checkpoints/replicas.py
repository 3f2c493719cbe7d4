"""Do ranks that hold the same values still hold the same bits?

Ranks with equal shards of a parameter take equal steps on equal gradients, so they stay bit-equal.
A batch, a learning rate or a memory fault of one rank breaks that, and nothing else shows it.

    every rank    a hash of each shard, by parameter and place, and of each buffer that steps change
    together      ranks whose hashes of the same part differ: `DivergenceError`

A parameter that several stages use is compared under its owner's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from autopar.errors import DivergenceError
from autopar.runtime.checkpoints.contents import ModuleState, part_of
from autopar.runtime.groups import current_context
from autopar.runtime.state import gathered
from autopar.runtime.storage import bytes_of
from autopar.runtime.tensors import Box

_MOST_SHOWN = 5


def check_replicas(state: ModuleState) -> None:
    """Raise `DivergenceError` on every rank if replicas differ; all ranks must call it.

    It names the parameters, the ranks and their hashes. It reads every local byte once.
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


def _hashes(state: ModuleState) -> Iterator[tuple[str, str]]:
    """(what it is a hash of, hash) of all that this rank holds."""
    place = state.place
    for p in place.parameters:
        part = part_of(place, p, state.locals_[p.name])
        current_context().flight.progress(f"comparing `{p.name}`")
        digest = blake2b(digest_size=8)
        for piece in part.pieces:
            digest.update(bytes_of(piece.value))
        at = "" if len(part.boxes) == 1 and part.boxes[0].sizes == part.shape else _text(part.boxes)
        yield f"`{p.mirror_of or p.name}`{at}", digest.hexdigest()
    for buffer in place.changed:
        if buffer.name in state.buffers:
            value = bytes_of(state.buffers[buffer.name])
            yield f"`{buffer.name}`", blake2b(value, digest_size=8).hexdigest()


def _text(boxes: Sequence[Box]) -> str:
    """Where a shard lies, as `[0:4, 8:16]`; of several boxes, all."""
    ends = (zip(box.start, box.sizes, strict=True) for box in boxes)
    return "".join(f"[{', '.join(f'{a}:{a + n}' for a, n in box)}]" for box in ends)
