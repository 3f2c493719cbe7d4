"""Checkpoints of autopar 0.3, and folders of `torch.distributed.checkpoint` (DCP), made readable.

Their metadata are a pickle. It is read here alone, by an unpickler that makes the few classes of
DCP's metadata and nothing else, and when a person asks for it. Data are read as DCP does, by
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import json
import pickle
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.errors import StateError
from autopar.runtime.storage import (
    Manifest,
    beside,
    disk_faults,
    make_draft,
    put_in_place,
    refuse_other_folder,
    whole_part,
    write_pieces,
)

_GROUP_BYTES = 2**30  # tensors are read and written in groups of about this size
_RECORD = ("step", "extra", "random", "loss_scale", "optimizer")
_EMPTY: dict[str, Any] = {
    "step": 0, "extra": {}, "random": None, "loss_scale": None, "optimizer": None,
}  # fmt: skip
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (formats.__name__, name): getattr(formats, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """How many tensors were converted, and the names of objects that were left out."""

    n_tensors: int
    left_out: tuple[str, ...]


def convert(source: Path, target: Path) -> Converted:
    """Write a checkpoint that `autopar.load` and `weights=path` read, from one that DCP wrote.

    Raises `StateError` for metadata that hold anything but tensors' places, and for data that are
    not tensors. Pickled objects beside the tensors are left out.
    """
    record = _old_record(source)
    with disk_faults("reading", source):
        reader = _Reader(source)
        entries = reader.read_metadata().state_dict_metadata
    tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    save_id, files = secrets.token_hex(16), []
    with disk_faults("writing", target):
        refuse_other_folder(target)
        make_draft(target)
        draft = beside(target, "draft")
        for k, names in enumerate(_groups(tensors)):
            pieces = {n: whole_part(v).pieces[0] for n, v in _values(reader, names).items()}
            path = draft / f"rank-00000-{k}.safetensors"
            files.append(write_pieces(path, pieces, save_id, 0, {"states": {}, "generators": None}))
        Manifest(save_id, tuple(files), record).write(draft)
        put_in_place(target)
    return Converted(len(tensors), tuple(sorted(entries.keys() - tensors.keys())))


class _Unpickler(pickle.Unpickler):
    """Makes DCP's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise StateError(
            f"the metadata ask for {module}.{name}, which no checkpoint needs",
            hint="the file may have been made to run code; do not use it",
        )


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with metadata read by `_Unpickler`."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise StateError(f"{path} is damaged: {error}") from error
        if not isinstance(found, Metadata):
            raise StateError(f"{path} is not the metadata of a checkpoint")
        return found


def _values(reader: _Reader, entries: Mapping[str, TensorStorageMetadata]) -> Mapping[str, Tensor]:
    values = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(values), storage_reader=reader, no_dist=True)
        except (RuntimeError, pickle.UnpicklingError, KeyError, dcp.CheckpointException) as error:
            raise StateError(f"the data of {reader.path} are damaged: {error}") from error
    return values


def _groups(
    tensors: Mapping[str, TensorStorageMetadata],
) -> Iterator[dict[str, TensorStorageMetadata]]:
    group: dict[str, TensorStorageMetadata] = {}
    n_bytes = 0
    for name, entry in tensors.items():
        group[name] = entry
        n_bytes += entry.size.numel() * entry.properties.dtype.itemsize
        if n_bytes >= _GROUP_BYTES:
            yield group
            group, n_bytes = {}, 0
    if group:
        yield group


def _old_record(source: Path) -> dict[str, Any]:
    """The record of autopar 0.3; an empty one for a folder that DCP alone wrote."""
    path = source / "autopar.json"
    if not path.exists():
        return dict(_EMPTY)
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("version") != 1:
        raise StateError(f"{path} is not the record of a checkpoint of autopar 0.3")
    return _EMPTY | {key: content[key] for key in _RECORD if key in content}
