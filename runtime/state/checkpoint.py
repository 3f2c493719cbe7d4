"""Checkpoints: parameters and optimizer state on disk, for any mesh and plan.

A checkpoint is a folder written by `torch.distributed.checkpoint` (DCP), and a record:

    <name>                          each key of model.state_dict(), whole shape
    optimizer.state.<name>.<key>    optimizer state under the parameter's name: sharded as the
                                    parameter where it has the shard's shape, else plain
    autopar.json                    step, extra, the stream of random numbers, options of the
                                    parameter groups, plain values

Every rank writes and reads the boxes of its own shards. So nothing is gathered, and another mesh,
plan or tool can shard the whole tensors differently. For a parameter that several stages use, the
owner's value and optimizer state are written, and all stages read those. Mirrors take the same
steps, so theirs are equal.

A save writes to `.<folder>.draft` beside the final place, and the record last. Then it renames
the old checkpoint to `.<folder>.old`, renames the draft, and removes the old one. So whenever the
job dies, `<folder>` or else `.<folder>.old` is a whole checkpoint. `load_checkpoint` takes the
first of them that has a record.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import OptionError
from autopar.operators import Stream
from autopar.program import StoredParameter
from autopar.runtime.state import dcp
from autopar.runtime.state.loss_scale import LossScale
from autopar.runtime.state.names import (
    StateError,
    all_names,
    check_buffer,
    constant_buffers,
    match_names,
    own_rank,
    together,
    world_size,
)
from autopar.runtime.state.optimizer_state import (
    OPTIMIZER_PREFIX,
    OptimizerState,
    merged_record,
    restore,
    split_state,
)
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.tensors import boxes, local_of

_RECORD = "autopar.json"
_FORMAT, _VERSION = "autopar checkpoint", 1


def save_checkpoint(
    place: StageState,
    locals_: Mapping[str, Tensor],
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    step: int,
    extra: Mapping[str, Any] | None,
    buffers: Mapping[str, Tensor] | None = None,
    stream: Stream | None = None,
    scale: LossScale | None = None,
) -> None:
    """Write a checkpoint folder, replacing the checkpoint that is there; all ranks call it.

    All ranks must see the same file system. When it returns, on any rank, the checkpoint is
    complete and in its place.

    Raises `OptionError` for an `extra` that does not survive JSON unchanged, and `StateError` for
    an optimizer of other parameters, for optimizer state that is neither sharded like its
    parameter nor a scalar, for tied parameters with different optimizer options, and for a folder
    that is not a checkpoint.
    """
    folder = Path(path).absolute()
    draft = _beside(folder, "draft")
    record: dict[str, Any] = {}
    values: dict[str, Tensor] = {}
    own: dict[str, Any] | None = None
    with together():
        record = _record(step, extra)
        record["random"] = None if stream is None else asdict(stream)
        record["loss_scale"] = None if scale is None else asdict(scale)
        _refuse_other_folder(folder)
        values |= _model_values(place, locals_) | dict(buffers or {})
        if optimizer is not None:
            state = split_state(place, locals_, optimizer)
            own = state.record
            values |= state.tensors
    records = _of_stages(place, own)
    with together():
        record["optimizer"] = merged_record(place, records)
        if own_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
    dcp.write(values, draft)
    with together():
        if own_rank() == 0:
            _write_record(draft / _RECORD, record)
            _put_in_place(draft, folder)


def load_checkpoint(
    place: StageState,
    locals_: Mapping[str, Tensor],
    optimizer: Optimizer | None,
    path: str | os.PathLike[str],
    buffers: Mapping[str, Tensor] | None = None,
    stream: Stream | None = None,
    scale: LossScale | None = None,
) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into shards, stream, scale and optimizer, in place; returns (step, extra).

    Stages, mesh, plan and the number of ranks may differ from those of the save. Without an
    optimizer, the checkpoint's optimizer state is ignored.

    Raises `StateError` on every rank, and changes nothing, if there is no complete checkpoint, or
    if its names, shapes or parameter groups do not fit.
    """
    record: dict[str, Any] = {}
    state: OptimizerState | None = None
    values: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    with together():
        folder = _finished(Path(path).absolute())
        record = _read_record(folder / _RECORD)
        stored = dcp.stored_tensors(folder)
        own = {n: tuple(t.size) for n, t in stored.items() if not n.startswith(OPTIMIZER_PREFIX)}
        constants = constant_buffers(buffers, place.changed_anywhere)
        found, _, _ = match_names(place.entries, own, constants, f"checkpoint {folder}")
        values = {found[owner]: _on_disk(place, p, locals_) for owner, p in place.held.items()}
        held = {n: torch.empty_like(b) for n, b in (buffers or {}).items() if n in own}
        if optimizer is not None:
            state = restore(place, locals_, optimizer, record.get("optimizer"), stored)
            values |= state.tensors
    dcp.read(values | held, folder)
    with together():
        for name in held.keys() & constants.keys():
            check_buffer(name, held[name], constants, f"checkpoint {folder}")
    for name in held.keys() - constants.keys():
        assert buffers is not None
        buffers[name].copy_(held[name])
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state.record)
    if stream is not None and record.get("random") is not None:
        stream.base, stream.n_steps = (int(record["random"][k]) for k in ("base", "n_steps"))
    if scale is not None and record.get("loss_scale") is not None:
        for name, value in record["loss_scale"].items():
            setattr(scale, name, type(getattr(scale, name))(value))
    return int(record["step"]), dict(record["extra"])


def _model_values(place: StageState, locals_: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that this stage owns, under all names; an owner writes for its mirrors."""
    values: dict[str, Tensor] = {}
    for owned in place.owned_by(place.stage):
        values |= dict.fromkeys(all_names(owned), _on_disk(place, owned, locals_))
    return values


def _on_disk(place: StageState, p: StoredParameter, locals_: Mapping[str, Tensor]) -> Tensor:
    return dcp.WholeOnDisk(
        local_of(locals_[p.name]), boxes(p, place.sizes, place.coordinate), p.shape
    )


def _of_stages(place: StageState, own: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    """The `own` of every stage's first rank, in stage order, on every rank."""
    if world_size() == 1:
        return [own]
    every: list[dict[str, Any] | None] = [None] * world_size()
    dist.all_gather_object(every, own if place.is_first else None)
    return [every[mesh.first_rank] for mesh in place.pipeline.meshes]


def _record(step: int, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(step, bool) or not isinstance(step, int):
        raise OptionError(f"step is the number of steps done, an int, not {step!r}")
    held = {} if extra is None else extra
    if not isinstance(held, dict):
        raise OptionError(f"extra is a dict, not {type(extra).__name__}")
    _check_json(held, "extra")
    return {
        "format": _FORMAT, "version": _VERSION, "step": step, "extra": held, "optimizer": None,
    }  # fmt: skip


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
        hint="use dicts with str keys, lists, str, int, float, bool and None; save tensors apart",
    )


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise StateError(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise StateError(f"{path} is not the record of a checkpoint")
    if record.get("version") != _VERSION:
        raise StateError(
            f"{path} has version {record.get('version')}, this release reads {_VERSION}",
            hint="load it with the release that saved it",
        )
    return record


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def _refuse_other_folder(folder: Path) -> None:
    """Raise `StateError` if the folder holds anything but a checkpoint: that is never deleted."""
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / _RECORD).is_file()):
        raise StateError(
            f"{folder} exists and is not a checkpoint; it is not overwritten",
            hint="choose another path, or remove it",
        )


def _put_in_place(draft: Path, folder: Path) -> None:
    old = _beside(folder, "old")
    if folder.exists():
        # A save that died after its last rename left it; `folder` is complete.
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _finished(folder: Path) -> Path:
    """The folder, or the old one that a save was about to replace when the job died."""
    for candidate in (folder, _beside(folder, "old")):
        if (candidate / _RECORD).is_file():
            return candidate
    raise StateError(
        f"there is no whole checkpoint at {folder}",
        hint="a save that was interrupted leaves only a draft; load an earlier checkpoint"
        if _beside(folder, "draft").exists()
        else "autopar.save writes checkpoints; for other weights use weights=path",
    )
