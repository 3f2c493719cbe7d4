"""Data files: safetensors files of one rank, which prove their own bytes.

A safetensors file is the length of its header (8 bytes), a JSON header, and the bytes of its
tensors (https://github.com/huggingface/safetensors, "Format"). It is written here, and not by the
library, because one pass then writes and hashes one tensor at a time, and the disk's own errors
arrive. The library reads it. torch's `HuggingFaceStorageWriter` (2.13) has no checksums: of 150
files with one flipped bit, 101 loaded as other numbers without a word. A number beside the tensors
makes its file unreadable, and a file is made whole in memory first.

In `__metadata__` of the header are

    DCP_SHARDING_INFO   where each piece begins in its tensor, so that torch's
                        `HuggingFaceStorageReader` reads the folder
    autopar             the id of the save, the rank, what else the rank noted, and per tensor its
                        whole shape and the checksum of the piece
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopar.errors import StateError
from autopar.runtime.groups import current_context
from autopar.runtime.storage.faults import DamagedError
from autopar.runtime.storage.pieces import Piece

_OWN, _SHARDING, _OFFSETS = "autopar", "DCP_SHARDING_INFO", "saved_offsets"
_ALIGNMENT = 8
_NO_DIGEST = "0" * 64
_CHUNK_BYTES = 2**24
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileEntry:
    """A data file as the manifest knows it."""

    name: str
    n_bytes: int
    header_digest: str


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file: where it lies in its tensor and in the file, and its checksum."""

    file: Path
    name: str
    dtype: torch.dtype
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    first_byte: int
    n_bytes: int
    digest: str

    def check(self) -> None:
        """Raise `DamagedError` unless the bytes on disk are those that were saved."""
        current_context().flight.progress(f"reading `{self.name}`")
        hashed, left = sha256(), self.n_bytes
        with self.file.open("rb") as file:
            file.seek(self.first_byte)
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                hashed.update(chunk)
                left -= len(chunk)
        if hashed.hexdigest() != self.digest:
            raise DamagedError(
                f"{self.file} is damaged: the checksum of `{self.name}` at {list(self.start)} "
                "does not fit",
                hint="nothing was loaded. Load an earlier checkpoint",
            )


@dataclass(frozen=True)
class DataFile:
    """The proved header of a file: its pieces, and what its rank noted."""

    rank: int
    pieces: tuple[StoredPiece, ...]
    notes: Mapping[str, Any]


@dataclass
class _Header:
    """The header of a file to write; its length does not depend on the digests."""

    order: list[str]
    pieces: Mapping[str, Piece]
    own: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        begin, table = 0, {}
        for name in self.order:
            value = self.pieces[name].value
            table[name] = {
                "dtype": _NAMES[value.dtype],
                "shape": list(value.shape),
                "data_offsets": [begin, begin + value.nbytes],
            }
            begin += value.nbytes
        tensors = {
            name: {"shape": list(p.shape), "sha256": self.digests.get(name, _NO_DIGEST)}
            for name, p in self.pieces.items()
        }
        sharding = {name: {_OFFSETS: list(p.start)} for name, p in self.pieces.items()}
        metadata = {
            "format": "pt",
            _SHARDING: json.dumps(sharding),
            _OWN: json.dumps({**self.own, "tensors": tensors}),
        }
        text = json.dumps({"__metadata__": metadata, **table}).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def write_pieces(
    path: Path, pieces: Mapping[str, Piece], save_id: str, rank: int, notes: Mapping[str, Any]
) -> FileEntry:
    """Write a data file, and wait until the disk has it.

    Raises `StateError` for a dtype that safetensors does not have.
    """
    for name, piece in pieces.items():
        if piece.value.dtype not in _NAMES:
            raise StateError(
                f"`{name}` is {piece.value.dtype}, which safetensors files cannot hold",
                hint=f"save one of {', '.join(sorted(map(str, _NAMES)))}",
            )
    order = sorted(pieces, key=lambda name: (-pieces[name].value.itemsize, name))
    header = _Header(order, pieces, {"id": save_id, "rank": rank, "notes": dict(notes)})
    with path.open("wb") as file:
        file.write(header.encoded())
        for name in order:
            current_context().flight.progress(f"writing `{name}`")
            content = bytes_of(pieces[name].value)
            header.digests[name] = sha256(content).hexdigest()
            file.write(content)
        n_bytes = file.tell()
        encoded = header.encoded()
        file.seek(0)
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path.name, n_bytes, sha256(encoded).hexdigest())


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a tensor, as they are on disk."""
    return as_bytes(value.cpu()).numpy().data


def as_bytes(value: Tensor) -> Tensor:
    """The bits of a tensor in row-major order, on its device."""
    flat = value.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element has any stride


def read_header(folder: Path, entry: FileEntry, save_id: str) -> DataFile:
    """Prove the size and the header of a file, and read what is in it.

    Raises `DamagedError` for a file that is absent, of another save or not as it was written.
    """
    path = folder / entry.name
    try:
        n_bytes = path.stat().st_size
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing", hint="load an earlier checkpoint") from None
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        text = file.read(length) if length <= n_bytes else b""
    is_proved = sha256(start + text).hexdigest() == entry.header_digest
    if not is_proved and _id_in(text) not in (None, save_id):
        raise DamagedError(
            f"{path} is of another save than {folder.name}/autopar.json",
            hint="files of two checkpoints were mixed; copy whole folders only",
        )
    if not is_proved or n_bytes != entry.n_bytes:
        what = f"{n_bytes} bytes, not {entry.n_bytes}" if is_proved else "its header has changed"
        raise DamagedError(f"{path} is damaged: {what}", hint="load an earlier checkpoint")
    try:
        return _parsed(path, text, first_byte=8 + length)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"the header of {path} is malformed: {error!r}") from error


def _id_in(text: bytes) -> str | None:
    """The id that a header gives that is not proved; None if it cannot be read."""
    try:
        return str(json.loads(json.loads(text)["__metadata__"][_OWN])["id"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _parsed(path: Path, text: bytes, first_byte: int) -> DataFile:
    table = json.loads(text)
    metadata = table.pop("__metadata__")
    own, sharding = json.loads(metadata[_OWN]), json.loads(metadata[_SHARDING])
    pieces = tuple(
        StoredPiece(
            file=path,
            name=name,
            dtype=DTYPES[entry["dtype"]],
            start=tuple(sharding[name][_OFFSETS]),
            sizes=tuple(entry["shape"]),
            shape=tuple(own["tensors"][name]["shape"]),
            first_byte=first_byte + entry["data_offsets"][0],
            n_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            digest=own["tensors"][name]["sha256"],
        )
        for name, entry in table.items()
    )
    return DataFile(int(own["rank"]), pieces, own["notes"])


def open_tensors(path: Path) -> Any:
    """The library's reader of a file, as a context manager."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise DamagedError(f"{path} is damaged: {error}") from error
