"""Loading in two phases: everything is read and checked, then everything is changed.

The first phase opens the newest whole checkpoint (`open_newest`), matches names, shapes and
parameter groups, and reads this rank's boxes into memory of their own. Then ranks agree. If any of
them found anything wrong, all raise, and no rank has changed anything.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import StateError
from autopar.operators import Stream
from autopar.runtime.checkpoints.contents import ModuleState, part_of
from autopar.runtime.checkpoints.optimizer_state import OptimizerState, restore
from autopar.runtime.checkpoints.random_state import set_random_state
from autopar.runtime.checkpoints.saving import States
from autopar.runtime.checkpoints.several import OneOptimizer, Optimizers, as_one
from autopar.runtime.checkpoints.trees import decoded
from autopar.runtime.state import (
    OWN_PREFIX,
    LossScale,
    check_buffer,
    constant_buffers,
    match_names,
    model_shapes,
    open_newest,
    own_rank,
    owner_name,
    together,
    world_size,
)
from autopar.runtime.storage import Checkpoint, DamagedError, Part


@dataclass(frozen=True)
class _Loaded:
    """What a checkpoint has for this rank, read and checked.

    values        (live part, the same with the values to copy into it)
    buffers       live buffer, its value
    """

    step: int
    extra: dict[str, Any]
    values: list[tuple[Part, Part]]
    buffers: list[tuple[Tensor, Tensor]]
    optimizer: OptimizerState | None
    stream: Stream | None
    scale: LossScale | None
    states: dict[str, Any]
    generators: dict[str, Any] | None


def load(
    state: ModuleState,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    states: States | None = None,
    verify: bool = True,
) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into module, optimizer, states and generators; returns (step, extra).

    Stages, mesh, plan and the number of ranks may differ from those of the save. Without an
    optimizer, the checkpoint's optimizer state is ignored. Unless `verify`, the checksums of the
    data are not computed; those of the manifest and the headers are.

    Raises `StateError` on every rank, and changes nothing, if there is no whole checkpoint, or if
    its names, shapes, parameter groups or constant buffers do not fit.
    """
    loaded: _Loaded | None = None
    with open_newest(path, verify) as checkpoint, together():
        one = as_one(optimizer)
        loaded = _read(checkpoint, state, one, states or {})
    assert loaded is not None
    _apply(loaded, state, one, states or {})
    return loaded.step, loaded.extra


def _read(
    checkpoint: Checkpoint, state: ModuleState, optimizer: OneOptimizer | None, states: States
) -> _Loaded:
    place, record = state.place, checkpoint.record
    source = f"checkpoint {checkpoint.folder}"
    stored = model_shapes(checkpoint)
    constants = constant_buffers(state.buffers, place.changed_anywhere)
    found, _, _ = match_names(place.entries, stored, constants, source)
    for name in sorted(constants.keys() & stored.keys()):
        check_buffer(name, checkpoint.whole(name), constants, source)
    moments = None
    if optimizer is not None:
        moments = restore(
            place, state.locals_, optimizer, record.get("optimizer"), checkpoint.tensors
        )
        for name, part in moments.parts:
            checkpoint.fill(name, part)
    values = []
    for p in place.parameters:
        live = part_of(place, p, state.locals_[p.name])
        read = Part(torch.empty_like(live.local, device="cpu"), live.boxes, live.shape)
        checkpoint.fill(found[owner_name(p)], read)
        values.append((live, read))
    live_names = sorted(state.buffers.keys() & (stored.keys() - constants.keys()))
    buffers = [(state.buffers[name], checkpoint.whole(name)) for name in live_names]
    stream, scale = _numbers(record, checkpoint)
    return _Loaded(
        record["step"], record["extra"], values, buffers, moments, stream, scale,
        _states(checkpoint, states, optimizer is not None), _generators(checkpoint),
    )  # fmt: skip


def _apply(
    loaded: _Loaded, state: ModuleState, optimizer: OneOptimizer | None, states: States
) -> None:
    with torch.no_grad():
        for live, read in loaded.values:
            for into, piece in zip(live.pieces, read.pieces, strict=True):
                into.value.copy_(piece.value)
        for buffer, value in loaded.buffers:
            buffer.copy_(value)
    if optimizer is not None and loaded.optimizer is not None:
        optimizer.load_state_dict(loaded.optimizer.record)
    for kept, read_state in ((state.stream, loaded.stream), (state.scale, loaded.scale)):
        if kept is not None and read_state is not None:
            vars(kept).update(vars(read_state))
    for name, value in loaded.states.items():
        states[name].load_state_dict(value)
    if loaded.generators is not None:
        set_random_state(loaded.generators)


def _numbers(
    record: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[Stream | None, LossScale | None]:
    try:
        random, scale = record["random"], record["loss_scale"]
        record["step"], record["extra"]
        return (
            None if random is None else Stream(**random),
            None if scale is None else LossScale(**scale),
        )
    except (KeyError, TypeError) as error:
        raise DamagedError(f"the record of {checkpoint.folder} is malformed: {error!r}") from error


def _states(checkpoint: Checkpoint, states: States, is_whole: bool) -> dict[str, Any]:
    """Name -> what the object saved on this rank, or on all.

    Raises `StateError` for an object that the checkpoint does not have, and for states that
    differed between ranks of another number.
    """
    saved = {r: note["states"] for r, note in checkpoint.notes.items() if note["states"]}
    names = set(next(iter(saved.values()), {}))
    absent = sorted(states.keys() - names)
    if absent:
        raise StateError(
            f"checkpoint {checkpoint.folder} has no state of {', '.join(map(repr, absent))}, but "
            f"of {sorted(names) or 'none'}",
            hint="give states= the names that autopar.save was given",
        )
    if is_whole and names - states.keys() and own_rank() == 0:
        warnings.warn(
            f"{sorted(names - states.keys())} of checkpoint {checkpoint.folder} are not loaded: "
            "autopar.load was not given them in states=",
            stacklevel=6,
        )
    if not states:
        return {}
    if len(saved) > 1 and len(checkpoint.notes) != world_size():
        raise StateError(
            f"{sorted(states)} differed between the {len(checkpoint.notes)} ranks that saved them, "
            f"and this job has {world_size()}",
            hint="leave them out of states=, and place them anew",
        )
    rank = own_rank() if len(saved) > 1 else next(iter(saved))
    return {name: _decoded(checkpoint, rank, saved[rank][name]) for name in states}


def _generators(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The generators of this rank; None in a checkpoint that was converted.

    With more ranks than saved, they are dealt round. So ranks that drew the same numbers still do.
    """
    rank = own_rank() % len(checkpoint.notes)
    held: dict[str, Any] | None = _decoded(checkpoint, rank, checkpoint.notes[rank]["generators"])
    return held


def _decoded(checkpoint: Checkpoint, rank: int, tree: Any) -> Any:
    return decoded(tree, lambda k: checkpoint.whole(f"{OWN_PREFIX}{rank}.{k}"))
