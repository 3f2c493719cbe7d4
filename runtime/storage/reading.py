"""A checkpoint that is open: what tensors it has, whether they are whole, and boxes of them.

Opening proves the manifest and every header, which takes milliseconds. `check` proves the data.
Ranks share that work, piece by piece; each of them reads every byte of its share, whether it needs
the tensor or not. So a checkpoint is whole, or refused, whatever is then taken of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.groups import current_context
from autopar.runtime.storage.data_files import DataFile, StoredPiece, open_tensors, read_header
from autopar.runtime.storage.faults import DamagedError, disk_faults
from autopar.runtime.storage.manifest import Manifest
from autopar.runtime.storage.pieces import Part, whole_part
from autopar.runtime.tensors import Box


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]


class Checkpoint:
    """A checkpoint folder, open for reading. Use it as a context manager.

    Raises `DamagedError` if it is not whole, and `StateError` if it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        with disk_faults("reading", folder):
            self.folder, self.manifest = folder, Manifest.read(folder)
            files = [read_header(folder, f, self.manifest.save_id) for f in self.manifest.files]
        self.tensors = _tensors(files, folder)
        self.notes = _notes(files)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    @property
    def record(self) -> Mapping[str, Any]:
        return self.manifest.record

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, share: int = 0, n_shares: int = 1) -> None:
        """Prove the data of one share of the pieces; `DamagedError` for the first that is bad."""
        every = [piece for tensor in self.tensors.values() for piece in tensor.pieces]
        every.sort(key=lambda piece: -piece.n_bytes)
        with disk_faults("reading", self.folder):
            for piece in every[share::n_shares]:
                piece.check()

    def fill(self, name: str, part: Part) -> None:
        """Copy the boxes of a part out of a tensor of the same shape."""
        current_context().flight.progress(f"reading `{name}`")
        for box in part.boxes:
            target = part.local[box.of_shard]
            for piece in self.tensors[name].pieces:
                overlap = _overlap(box, piece)
                if overlap is not None:
                    of_piece, of_box = overlap
                    target[of_box].copy_(self._read(piece, of_piece))

    def whole(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        stored = self.tensors[name]
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, whole_part(value))
        return value

    def _read(self, piece: StoredPiece, index: tuple[slice, ...]) -> Tensor:
        if piece.file not in self._open:
            self._open[piece.file] = self._stack.enter_context(open_tensors(piece.file))
        file = self._open[piece.file]
        if not index:
            return file.get_tensor(piece.name)
        return file.get_slice(piece.name)[index]


def _tensors(files: list[DataFile], folder: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, whose pieces cover it."""
    by_name: dict[str, list[StoredPiece]] = {}
    for file in files:
        for piece in file.pieces:
            by_name.setdefault(piece.name, []).append(piece)
    out = {}
    for name, pieces in by_name.items():
        shape, dtype = pieces[0].shape, pieces[0].dtype
        n_held = sum(math.prod(piece.sizes) for piece in pieces)
        if n_held != math.prod(shape) or any((p.shape, p.dtype) != (shape, dtype) for p in pieces):
            raise DamagedError(
                f"{folder} is damaged: its files have {n_held} elements of `{name}`, whose shape "
                f"is {shape}",
            )
        out[name] = StoredTensor(shape, dtype, tuple(pieces))
    return out


def _notes(files: list[DataFile]) -> dict[int, dict[str, Any]]:
    """Rank -> what it noted in its files."""
    notes: dict[int, dict[str, Any]] = {}
    for file in files:
        notes.setdefault(file.rank, {}).update(file.notes)
    return dict(sorted(notes.items()))


def _overlap(box: Box, piece: StoredPiece) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a box and a piece meet: in the piece, and in the box. None if they do not."""
    of_piece, of_box = [], []
    for at, n, start, size in zip(box.start, box.sizes, piece.start, piece.sizes, strict=True):
        begin, end = max(at, start), min(at + n, start + size)
        if begin >= end:
            return None
        of_piece.append(slice(begin - start, end - start))
        of_box.append(slice(begin - at, end - at))
    return tuple(of_piece), tuple(of_box)
