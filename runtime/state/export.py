"""Weights in the files of Hugging Face: safetensors of a bounded size, and an index.

    model-00001-of-00003.safetensors ...    whole tensors, in the order of stages
    model.safetensors.index.json            name -> file
    config.json ...                         what `add_files` writes

A stage gathers one parameter at a time, and rank 0 writes a file as soon as it is full. So no rank
holds the whole model. A tied parameter is written once, under its owner's name, as transformers
does; `weights=path` and `from_pretrained` know its other names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from autopar.errors import OptionError, StateError
from autopar.runtime.state.access import values_on_rank_0
from autopar.runtime.state.names import own_rank, together
from autopar.runtime.state.stage_state import StageState
from autopar.runtime.storage import beside, discard, disk_faults, make_draft

INDEX = "model.safetensors.index.json"


def export_weights(
    place: StageState,
    locals_: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    max_shard_bytes: int,
    buffers: Mapping[str, Tensor] | None = None,
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Write the weights and persistent buffers to a new folder; all ranks call it.

    `add_files` writes what else belongs to the folder, on rank 0.

    Raises `OptionError` for a size below 1, and `StateError` for a folder that is not empty, and
    for what the file system refuses.
    """
    folder = Path(path).absolute()
    with together(), disk_faults("writing", folder):
        if max_shard_bytes < 1:
            raise OptionError(f"max_shard_bytes is a size in bytes, not {max_shard_bytes}")
        if own_rank() == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise StateError(f"{folder} exists already", hint="export to a new folder")
            make_draft(folder)
    files: list[list[str]] = []
    n_bytes, error = 0, None
    values = values_on_rank_0(place, locals_, buffers, place.changed_anywhere)
    for held in _grouped(values, max_shard_bytes):
        files.append(list(held))
        n_bytes += sum(value.nbytes for value in held.values())
        try:
            if error is None:
                save_file(held, _draft_of(folder, len(files)), {"format": "pt"})
        except (SafetensorError, OSError) as raised:
            error = raised  # the other stages go on sending: ranks raise together, below
    try:
        with together(), disk_faults("writing", folder):
            if error is not None:
                raise StateError(f"writing {folder} failed: {error}", hint="is its disk full?")
            if own_rank() == 0:
                if add_files is not None:
                    add_files(beside(folder, "draft"))
                _finish(folder, files, n_bytes)
    except StateError:
        if own_rank() == 0:
            discard(folder)
        raise


def _grouped(
    values: Iterator[tuple[tuple[str, ...], Tensor]], max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """First name -> value, as many as fit in `max_bytes`, or a single one that does not."""
    held: dict[str, Tensor] = {}
    n_bytes = 0
    for names, value in values:
        if held and n_bytes + value.nbytes > max_bytes:
            yield held
            held, n_bytes = {}, 0
        held[names[0]] = value.contiguous()
        n_bytes += value.nbytes
    if held:
        yield held


def _draft_of(folder: Path, number: int) -> Path:
    return beside(folder, "draft") / f"{number}.safetensors"


def _finish(folder: Path, files: list[list[str]], n_bytes: int) -> None:
    """Name the files by their count, and put them in place."""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        draft = _draft_of(folder, number)
        draft.rename(draft.with_name(final))
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    (beside(folder, "draft") / INDEX).write_text(json.dumps(index, indent=2))
    beside(folder, "draft").rename(folder)
