"""Decides how a checkpoint lies on disk, and proves that it is whole before any of it is used.

Read `manifest.py` (the record under a checksum, and what files there are), `pieces.py` (what of a
tensor is in which file), `data_files.py` (safetensors files with a checksum per piece),
`reading.py` (a checkpoint that is open), then `folders.py` (atomic replacement, steps side by
side) and `faults.py` (errors of the disk, in words). It knows names, boxes and bytes; what they
mean is decided in `state` and `checkpoints`.

Mainly hands on `Checkpoint`, `write_pieces` and `put_in_place`.
"""

from autopar.runtime.storage.data_files import FileEntry, as_bytes, bytes_of, write_pieces
from autopar.runtime.storage.faults import DamagedError, disk_faults
from autopar.runtime.storage.folders import (
    beside,
    candidates,
    discard,
    holds_checkpoint,
    make_draft,
    prune,
    put_in_place,
    refuse_other_folder,
    step_folder,
)
from autopar.runtime.storage.manifest import Manifest
from autopar.runtime.storage.pieces import Part, Piece, files_of, whole_part
from autopar.runtime.storage.reading import Checkpoint, StoredTensor

__all__ = [
    "Checkpoint",
    "DamagedError",
    "FileEntry",
    "Manifest",
    "Part",
    "Piece",
    "StoredTensor",
    "as_bytes",
    "beside",
    "bytes_of",
    "candidates",
    "discard",
    "disk_faults",
    "files_of",
    "holds_checkpoint",
    "make_draft",
    "prune",
    "put_in_place",
    "refuse_other_folder",
    "step_folder",
    "whole_part",
    "write_pieces",
]
