"""Weights: the initial values of a rank's shards, from a model, an initialiser or a file.

    "rank0"   rank 0's model: one whole parameter at a time is broadcast, and each rank cuts
              its shard
    "init"    a model on `meta`: every rank initialises the same values, one group of modules
              at a time, and keeps its shard (`initialise.py`)
    a path    a .safetensors file, a folder of them, or a checkpoint: each rank reads only the
              boxes of its shards (`boxes` in `sharding.py`)

All stages that use a tied parameter read or draw it under its owner's name. Beyond the user's
model, which is never modified, a rank never holds more than one whole parameter (or group).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.errors import StateError
from autopar.program.lines import ChangedBuffer, StoredParameter
from autopar.runtime.state.initialise import initial_values
from autopar.runtime.state.names import (
    all_names,
    check_buffer,
    constant_buffers,
    match_names,
    own_rank,
    together,
    world_size,
)
from autopar.runtime.state.opening import model_shapes, open_newest
from autopar.runtime.state.stage_state import StageState, owner_name
from autopar.runtime.storage import Part, holds_checkpoint, whole_part
from autopar.runtime.tensors import boxes, local_shard

_INDEX = "model.safetensors.index.json"


def initial_shards(
    place: StageState,
    weights: str | os.PathLike[str],
    model: nn.Module,
    seed: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> dict[str, nn.Parameter]:
    """This rank's shard of every parameter of its stage, by name; `requires_grad` is the model's.

    A mirror gets its owner's values. `seed` is for weights="init"; by default it is rank 0's
    `torch.initial_seed()`. `buffers` are those that the stage changes (`changed_buffers`), with
    the model's values; "rank0" and a path overwrite them. If `torch.distributed` is initialised,
    this is a collective of the whole world.

    Raises `StateError` on all ranks when names or shapes do not fit, listing them, or when
    there are no values to read.
    """
    if weights == "rank0":
        shards = _rank0_weights(place, model)
        _buffers_from_rank0(place, model, buffers or {})
    elif weights == "init":
        shared = _shared_seed(seed)
        with together():
            shards = _initialised(place, model, shared)
    else:
        shards = {
            p.name: torch.zeros(p.stored.shape, dtype=p.stored.dtype, device=place.device)
            for p in place.parameters  # padding is in no file
        }
        _fill_from_path(place, shards, Path(weights), model, buffers or {})
    return {
        p.name: nn.Parameter(
            shards[p.name].to(place.device, p.stored.dtype), requires_grad=p.requires_grad
        )
        for p in place.parameters
    }


def initial_buffers(
    model: nn.Module, device: torch.device, seed: int | None = None
) -> dict[str, Tensor]:
    """The persistent buffers, as in `model.state_dict()`; copies on `device`.

    A buffer on `meta` gets its value from its module's initialiser, whatever the weights.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = {n: v for n, v in model.state_dict().items() if n not in parameters}
    empty = [n for n, v in held.items() if isinstance(v, Tensor) and v.is_meta]
    seed = torch.initial_seed() if seed is None else seed
    filled = dict(initial_values(model, empty, seed)) if empty else {}
    return {
        name: filled.get(name, value).detach().to(device, copy=True)
        for name, value in held.items()
        if isinstance(value, Tensor)  # not a module's extra state
    }


def changed_buffers(
    place: StageState, model: nn.Module, seed: int | None = None
) -> dict[str, Tensor]:
    """The model's values of the buffers that this rank's stages change, persistent or not.

    A buffer on `meta` gets its value from its module's initialiser.
    """
    held = {b.name: model.get_buffer(b.name).detach() for b in place.changed}
    empty = [name for name, value in held.items() if value.is_meta]
    seed = torch.initial_seed() if seed is None else seed
    held |= dict(initial_values(model, empty, seed)) if empty else {}
    return {b.name: held[b.name].to(place.device, b.local.dtype, copy=True) for b in place.changed}


def _rank0_weights(place: StageState, model: nn.Module) -> dict[str, Tensor]:
    values: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    with together():
        if own_rank() == 0:
            _check_model(place.owners, values)
    shards = {}
    for owned in place.owners:
        dtype = owned.stored.dtype
        if world_size() == 1:
            whole = values[owned.name]
        elif own_rank() == 0:
            whole = values[owned.name].detach().to(place.device, dtype).contiguous()
        else:
            whole = torch.empty(owned.shape, dtype=dtype, device=place.device)
        if world_size() > 1:
            dist.broadcast(whole, src=0)
        for kept in place.held.get(owned.name, ()):
            shards[kept.name] = local_shard(whole, kept, place.sizes, place.coordinate)
    return shards


def _buffers_from_rank0(place: StageState, model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Other ranks take the values of rank 0; their models may hold other values, or none."""
    if world_size() == 1:
        return
    for program in place.pipeline.stages:
        for buffer in program.changed:
            value = torch.empty(buffer.shape, dtype=buffer.local.dtype, device=place.device)
            if own_rank() == 0:
                value.copy_(model.get_buffer(buffer.name))
            dist.broadcast(value, src=0)
            if buffer in place.changed:
                buffers[buffer.name].copy_(value)


def _check_model(parameters: Sequence[StoredParameter], values: Mapping[str, Tensor]) -> None:
    match_names(parameters, {n: tuple(v.shape) for n, v in values.items()}, {}, "the model")
    empty = [p.name for p in parameters if values[p.name].is_meta]
    if empty:
        raise StateError(
            f'weights="rank0" needs values, but the model of rank 0 is on meta: {empty[0]}'
            + (f" and {len(empty) - 1} more" if len(empty) > 1 else ""),
            hint='use weights="init" or a path, or build the model on CPU',
        )


def _shared_seed(seed: int | None) -> int:
    """`seed`, or that of rank 0, because every rank must draw the same values."""
    held: list[Any] = [torch.initial_seed() if seed is None else seed]
    if world_size() > 1:
        dist.broadcast_object_list(held, src=0)
    return int(held[0])


def _initialised(place: StageState, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Values drawn under the owners' names, so that a mirror's values are its owner's."""
    shards = {}
    for name, value in initial_values(model, list(place.held), seed):
        for kept in place.held[name]:
            shards[kept.name] = local_shard(value, kept, place.sizes, place.coordinate)
    return shards


def _fill_from_path(
    place: StageState,
    shards: Mapping[str, Tensor],
    path: Path,
    model: nn.Module,
    changed: Mapping[str, Tensor],
) -> None:
    constants: dict[str, Tensor] = {}
    with together():
        if not path.exists():
            raise StateError(
                f"weights={str(path)!r}: there is no such file or folder",
                hint='weights are "rank0", "init", a .safetensors file, a folder of them, or a '
                "checkpoint folder",
            )
        held = initial_buffers(model, torch.device("cpu"))
        constants = constant_buffers(held, place.changed_anywhere)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    expected = _Expected(place.entries, str(path), constants, tuple(ignored))
    if holds_checkpoint(path):
        _fill_from_checkpoint(expected, place, shards, path, changed)
        return
    with together(), _Safetensors(path) as files:
        names = expected.match(files.shapes)
        for kept in place.parameters:
            for box in boxes(kept, place.sizes, place.coordinate):
                part = files.read(names[owner_name(kept)], box.of_whole)
                shards[kept.name][box.of_shard].copy_(part)
        for buffer in place.changed:
            if buffer.persistent:
                changed[buffer.name].copy_(files.read(names[buffer.name]))
        for name in sorted(constants.keys() & files.shapes.keys()):
            check_buffer(name, files.read(name), constants, str(path))


@dataclass(frozen=True)
class _Expected:
    """Checks a source of weights against the entries of the model."""

    entries: Sequence[StoredParameter | ChangedBuffer]
    source: str
    constants: Mapping[str, Tensor]
    ignored: tuple[str, ...]

    def match(self, given: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Wanted name -> name in the source; respects transformers' list of keys to ignore."""
        known = {name for value in self.entries for name in all_names(value)} | set(self.constants)
        kept = {
            name: shape
            for name, shape in given.items()
            if name in known or not any(re.search(pattern, name) for pattern in self.ignored)
        }
        return match_names(self.entries, kept, self.constants, self.source)[0]


def _fill_from_checkpoint(
    expected: _Expected,
    place: StageState,
    shards: Mapping[str, Tensor],
    path: Path,
    changed: Mapping[str, Tensor],
) -> None:
    with open_newest(path) as checkpoint, together():
        stored = model_shapes(checkpoint)
        names = expected.match(stored)
        for kept in place.parameters:
            own = boxes(kept, place.sizes, place.coordinate)
            into = Part(shards[kept.name], own, kept.shape)
            checkpoint.fill(names[owner_name(kept)], into)
        for buffer in place.changed:
            if buffer.persistent:
                checkpoint.fill(names[buffer.name], whole_part(changed[buffer.name]))
        for name in sorted(expected.constants.keys() & stored.keys()):
            check_buffer(name, checkpoint.whole(name), expected.constants, expected.source)


class _Safetensors:
    """One .safetensors file, or a folder of them with or without an index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._of: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> _Safetensors:
        for file in self._files():
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except SafetensorError as error:
                raise StateError(f"cannot read weights from {file}: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in self._of:
                    raise StateError(
                        f"`{name}` is in several files of {self.path}, {file.name} among them",
                        hint="keep one copy of the weights in the folder; parts of tensors are not "
                        "read, unless autopar.save wrote them",
                    )
                self._of[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A block of one tensor; only its bytes are read."""
        if not index:
            return self._of[name].get_tensor(name)
        return self._of[name].get_slice(name)[index]

    def _files(self) -> list[Path]:
        if self.path.is_file():
            if self.path.suffix != ".safetensors":
                raise StateError(
                    f"weights={str(self.path)!r} is not a .safetensors file",
                    hint="save the state dict with safetensors.torch.save_file",
                )
            return [self.path]
        index = self.path / _INDEX
        if index.is_file():
            listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            absent = [name for name in listed if not (self.path / name).is_file()]
            if absent:
                raise StateError(f"{index} lists files that are not there: {', '.join(absent)}")
            return [self.path / name for name in listed]
        found = sorted(self.path.glob("*.safetensors"))
        if not found:
            raise StateError(
                f"{self.path} holds neither .safetensors files nor a finished checkpoint",
                hint="a checkpoint whose save was interrupted is not loaded",
            )
        return found
