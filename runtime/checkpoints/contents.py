"""What a module gives to a checkpoint, and which rank writes which part of it.

    <name>                          each key of model.state_dict(), whole shape
    optimizer.state.<name>.<key>    optimizer state under the parameter's name: sharded as the
                                    parameter where it has the shard's shape, else plain
    autopar.<rank>.<n>              tensors of other objects' states, and of random generators

Every rank writes and reads the boxes of its own shards. So nothing is gathered, and another mesh,
plan or tool can shard the whole tensors differently. Ranks with equal shards take turns, by a hash
of the name, so that each writes a share. For a parameter that several stages use, the owner's value
and optimizer state are written, and all stages read those. Mirrors take the same steps, so theirs
are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

from torch import Tensor

from autopar.operators import Stream
from autopar.program.lines import StoredParameter
from autopar.runtime.state import LossScale, StageState, all_names
from autopar.runtime.storage import Part, whole_part
from autopar.runtime.tensors import boxes, local_of


@dataclass(frozen=True)
class ModuleState:
    """What a module gives to a checkpoint, and takes from one.

    locals_   parameter name -> this rank's parameter
    buffers   name -> persistent buffer
    stream    the module's random numbers; None without
    scale     the loss scale of float16; None without
    """

    place: StageState
    locals_: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    stream: Stream | None = None
    scale: LossScale | None = None


def part_of(place: StageState, p: StoredParameter, local: Tensor) -> Part:
    """This rank's part of a parameter, or of what is sharded like it."""
    return Part(local_of(local), boxes(p, place.sizes, place.coordinate), tuple(p.shape))


def model_parts(state: ModuleState) -> dict[str, Part]:
    """What this rank writes of the parameters that its stages own, under all names, and buffers."""
    place = state.place
    parts: dict[str, Part] = {}
    for owned in place.owned:
        for name in all_names(owned):
            if writes_shard(place, owned, name):
                parts[name] = part_of(place, owned, state.locals_[owned.name])
    changed = {name for buffer in place.changed for name in all_names(buffer)}
    for name, value in state.buffers.items():
        if writes_copy(place, name) if name in changed else _is_turn(name, *_in_world(place)):
            parts[name] = whole_part(value)
    return parts


def writes_shard(place: StageState, p: StoredParameter, key: str) -> bool:
    """Whether this rank writes its shard of what is sharded like `p`, under `key`."""
    number, count = 0, 1
    placements = p.stored.spec.placements
    for placement, at, size in zip(placements, place.coordinate, place.sizes, strict=True):
        if not placement.is_shard:
            number, count = number * size + at, count * size
    return _is_turn(key, number, count)


def writes_copy(place: StageState, key: str) -> bool:
    """Whether this rank writes what every rank of its mesh has whole."""
    return _is_turn(key, place.rank - place.mesh.first_rank, place.mesh.n_ranks)


def _in_world(place: StageState) -> tuple[int, int]:
    return place.rank, place.pipeline.n_ranks


def _is_turn(key: str, number: int, count: int) -> bool:
    return crc32(key.encode()) % count == number
