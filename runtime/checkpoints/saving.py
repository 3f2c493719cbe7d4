"""Saving in three steps, which `AsyncSaver` takes apart.

    snapshot    what is saved, as views of live tensors; ranks agree that it can be
    write       each rank writes its own files to a draft, without the others
    publish     rank 0 writes the manifest, and the draft becomes the checkpoint

A save that fails removes its draft. Whenever it fails, what was saved before is untouched.
"""

from __future__ import annotations

import copy
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from autopar.errors import OptionError
from autopar.runtime.checkpoints.contents import ModuleState, model_parts
from autopar.runtime.checkpoints.optimizer_state import merged_record, split_state
from autopar.runtime.checkpoints.random_state import random_state
from autopar.runtime.checkpoints.replicas import check_replicas
from autopar.runtime.checkpoints.several import Optimizers, as_one, refuse_as_state
from autopar.runtime.checkpoints.trees import encoded
from autopar.runtime.state import OWN_PREFIX, StageState, gathered, own_rank, together
from autopar.runtime.storage import (
    FileEntry,
    Manifest,
    Part,
    Piece,
    beside,
    bytes_of,
    discard,
    disk_faults,
    files_of,
    make_draft,
    put_in_place,
    refuse_other_folder,
    whole_part,
    write_pieces,
)


class Stateful(Protocol):
    """What `states` may hold: a scheduler, a loader, a sampler, ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


States = Mapping[str, Stateful]


@dataclass(frozen=True)
class Snapshot:
    """What this rank saves: the record of all ranks, its own pieces by file, and its notes."""

    record: Mapping[str, Any]
    files: list[dict[str, Piece]]
    notes: Mapping[str, Any]


def save(
    state: ModuleState,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    step: int,
    extra: Mapping[str, Any] | None = None,
    states: States | None = None,
) -> None:
    """Write a checkpoint folder, replacing the checkpoint that is there; all ranks call it.

    All ranks must see the same file system. When it returns, on any rank, the checkpoint is
    complete and in its place.

    Raises `OptionError` for an `extra` that does not survive JSON unchanged, for `states` that only
    a pickle could hold or that are sharded, and for what is no optimizer. Raises `StateError` for
    an optimizer of other parameters, for optimizer state that is neither sharded like its parameter
    nor a scalar, for tied parameters with different optimizer options, for a folder that is not a
    checkpoint, and for what the file system refuses. Raises `DivergenceError` if ranks that should
    hold equal values do not.
    """
    folder = Path(path).absolute()
    check_replicas(state)
    taken = snapshot(state, optimizer, step, extra, states)
    save_id = begin(folder)
    write_and_publish(folder, taken, save_id)


def snapshot(
    state: ModuleState,
    optimizer: Optimizers,
    step: int,
    extra: Mapping[str, Any] | None,
    states: States | None,
) -> Snapshot:
    """What every rank saves; a collective. Its tensors share memory with the live ones."""
    record: dict[str, Any] = {}
    parts: dict[str, Part] = {}
    own: dict[str, Any] | None = None
    trees: dict[str, Any] = {}
    tensors: list[Tensor] = []
    with together():
        record = _record(step, extra)
        record["random"] = None if state.stream is None else asdict(state.stream)
        record["loss_scale"] = None if state.scale is None else asdict(state.scale)
        parts |= model_parts(state)
        if (one := as_one(optimizer)) is not None:
            split = split_state(state.place, state.locals_, one)
            own = split.record
            parts |= dict(split.parts)
        for name, it in (states or {}).items():
            refuse_as_state(name, it)
        trees = {
            name: encoded(it.state_dict(), f"states[{name!r}]", tensors)
            for name, it in (states or {}).items()
        }
    every = gathered((own if state.place.is_first else None, _digest(trees, tensors)))
    if own_rank() > 0 and all(digest == every[0][1] for _, digest in every):
        trees, tensors = {}, []  # the same as rank 0's
    notes = {"states": trees, "generators": encoded(random_state(), "generators", tensors)}
    parts |= {f"{OWN_PREFIX}{own_rank()}.{k}": whole_part(t) for k, t in enumerate(tensors)}
    with together():
        record["optimizer"] = merged_record(state.place, _of_stages(state.place, every))
    return Snapshot(record, files_of(parts), notes)


def begin(folder: Path) -> str:
    """Make an empty draft; returns the id of the save. A collective."""
    with together(), disk_faults("writing", folder):
        refuse_other_folder(folder)
        if own_rank() == 0:
            make_draft(folder)
    return str(gathered(secrets.token_hex(16))[0])


def write_and_publish(
    folder: Path, taken: Snapshot, save_id: str, group: dist.ProcessGroup | None = None
) -> None:
    """Write this rank's files; when all have, the draft becomes the checkpoint. A collective.

    `group`: all ranks, for a thread of its own.
    """
    rank, entries = own_rank(), list[FileEntry]()
    with _draft_removed_on_failure(folder):
        with together(group), disk_faults("writing", folder):
            for k, pieces in enumerate(taken.files):
                path = beside(folder, "draft") / f"rank-{rank:05d}-{k}.safetensors"
                entries.append(write_pieces(path, pieces, save_id, rank, taken.notes))
        every = gathered(entries, group)
        with together(group):
            if rank == 0:
                with disk_faults("writing", folder):
                    files = tuple(entry for own in every for entry in own)
                    Manifest(save_id, files, taken.record).write(beside(folder, "draft"))
                    put_in_place(folder)


@contextmanager
def _draft_removed_on_failure(folder: Path) -> Iterator[None]:
    """All ranks raise together, so none writes any more."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done and own_rank() == 0:
            discard(folder)


def _of_stages(place: StageState, every: list[Any]) -> list[dict[str, Any] | None]:
    """The optimizer records of every stage's first rank, in stage order."""
    return [every[mesh.first_rank][0] for mesh in place.pipeline.meshes][: len(every)]


def _digest(trees: Mapping[str, Any], tensors: list[Tensor]) -> str:
    """Equal on ranks whose objects have equal states."""
    hashed = sha256(repr(trees).encode())
    for value in tensors:
        hashed.update(bytes_of(value))
    return hashed.hexdigest()


def _record(step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int):
        raise OptionError(f"step is the number of steps done, an int, not {step!r}")
    held = {} if extra is None else extra
    if not isinstance(held, dict):
        raise OptionError(f"extra is a dict, not {type(extra).__name__}")
    _check_json(held, "extra")
    return {"step": step, "extra": copy.deepcopy(held)}


def _check_json(value: Any, where: str) -> None:
    """Refuse values that JSON cannot hold, or would return as something else."""
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) is list:
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise OptionError(f"{where} has the key {key!r}; keys must be str")
            _check_json(item, f"{where}[{key!r}]")
        return
    raise OptionError(
        f"{where} is a {type(value).__name__}, which JSON cannot give back",
        hint="use dicts with str keys, lists, str, int, float, bool and None; objects with a "
        "state_dict(), and tensors in it, go into states=",
    )
