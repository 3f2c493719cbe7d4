"""What of a tensor a rank writes or reads: boxes of it, each of which is a piece on disk.

Part     one rank's part of a whole tensor: a local tensor, and where its boxes lie
Piece    one box, with its own bytes, on its way to a file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from autopar.runtime.tensors import Box


@dataclass(frozen=True)
class Part:
    """One rank's part of a whole tensor of shape `shape`: `local` holds its boxes."""

    local: Tensor
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its boxes, as views of `local`."""
        held = self.local.detach()
        return tuple(Piece(held[box.of_shard], box.start, self.shape) for box in self.boxes)


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor that begins at `start`."""

    value: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]


def whole_part(value: Tensor) -> Part:
    """A whole tensor as a part: one box."""
    shape = tuple(value.shape)
    begin = (0,) * len(shape)
    return Part(value, (Box(begin, begin, shape),), shape)


def files_of(parts: Mapping[str, Part]) -> list[dict[str, Piece]]:
    """File k has the k-th piece of every part: a safetensors file has each name once."""
    files: list[dict[str, Piece]] = [{}]
    for name, part in parts.items():
        for k, piece in enumerate(part.pieces):
            if k == len(files):
                files.append({})
            files[k][name] = piece
    return files
