"""Shards as `torch.distributed.checkpoint` (DCP) reads and writes them: one chunk per box.

DCP takes a DTensor's shard for one box that begins at its first element. A strided shard is
several boxes. Saving one fails (overlapping chunks), and loading one silently fills it with other
rows. But DCP asks any tensor with its `_Checkpointable` protocol for chunks, and a DTensor's local
tensor likewise. Both classes here answer with boxes. So for every spec the files are what DCP
defines for DTensors, and any mesh or plan can read them.

    WholeOnDisk   stands for the whole tensor while DCP plans; needs no process group
    BoxedLocal    the local tensor of a DTensor, where it is a strided shard or a mirror of
                  what another stage saves under the same name
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.runtime.state.names import StateError, world_size
from autopar.runtime.tensors import Box, Boxed, Chunks

_DISABLED = "torch.distributed is disabled, unavailable or uninitialized"


class WholeOnDisk(Boxed, Tensor):
    """A tensor of the whole shape that holds only this rank's boxes, for DCP to fill or read."""

    _chunks: Chunks

    @staticmethod
    def __new__(cls, local: Tensor, held: Sequence[Box], whole_shape: Sequence[int]) -> WholeOnDisk:
        self = Tensor._make_wrapper_subclass(
            cls, tuple(whole_shape), dtype=local.dtype, device=local.device
        )
        self._chunks = Chunks(local.detach(), tuple(held), tuple(whole_shape))
        return self

    def __init__(self, local: Tensor, held: Sequence[Box], whole_shape: Sequence[int]) -> None:
        """`__new__` sets everything, as tensor subclasses require."""

    def chunks(self) -> Chunks:
        return self._chunks

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a tensor that only stands for boxes on disk")


class BoxedLocal(Boxed, Tensor):
    """A local tensor that knows its boxes; any operator on it gives a plain tensor."""

    _chunks: Chunks

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(
        local: Tensor, held: Sequence[Box], whole_shape: Sequence[int], is_written: bool = True
    ) -> BoxedLocal:
        """Unless `is_written`, DCP loads into it but never saves it: another rank does."""
        self = local.detach().as_subclass(BoxedLocal)
        self._chunks = Chunks(local.detach(), tuple(held), tuple(whole_shape), is_written)
        return self

    def chunks(self) -> Chunks:
        return self._chunks


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence the warning that a world of one has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DISABLED)
        yield


def write(values: Mapping[str, Tensor], folder: Path) -> None:
    """Save `values` with DCP; a collective of the whole world."""
    with _one_process():
        dcp.save(dict(values), checkpoint_id=folder, no_dist=world_size() == 1)


def read(values: Mapping[str, Tensor], folder: Path) -> None:
    """Fill `values` in place from a DCP folder; a collective of the whole world."""
    with _one_process(), torch.no_grad():
        dcp.load(dict(values), checkpoint_id=folder, no_dist=world_size() == 1)


def is_dcp_folder(folder: Path) -> bool:
    """Whether DCP finished writing here: its metadata is the last file it renames."""
    return (folder / ".metadata").is_file()


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape, dtype and chunks of every tensor in a DCP folder.

    Raises `StateError` for a folder that DCP did not finish, or cannot read.
    """
    if not is_dcp_folder(folder):
        raise StateError(
            f"{folder} is not a finished checkpoint: it has no .metadata file",
            hint="the save was interrupted, or this is another folder",
        )
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except (EOFError, pickle.UnpicklingError) as error:
        raise StateError(f"the metadata of checkpoint {folder} is damaged: {error}") from error
    items = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in items if isinstance(entry, TensorStorageMetadata)}
