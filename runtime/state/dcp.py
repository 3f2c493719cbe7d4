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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.runtime.state.names import StateError, world_size
from autopar.runtime.state.sharding import Box

_DISABLED = "torch.distributed is disabled, unavailable or uninitialized"


class _Boxed:
    """DCP's protocol over the boxes of a shard."""

    _boxes: tuple[Box, ...]
    _whole_shape: tuple[int, ...]
    _shard: Tensor
    _is_written: bool = True

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if not self._is_written:
            return []
        properties = TensorProperties.create_from_tensor(self._shard)
        whole = torch.Size(self._whole_shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.sizes)) for b in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of the shard that holds the box at `index.offset`."""
        start = tuple(index.offset) if index.offset is not None else None
        for box in self._boxes:
            if start is None or box.start == start:
                return self._shard[box.of_shard]
        raise StateError(f"no part of `{index.fqn}` starts at {start} on this rank")


class WholeOnDisk(_Boxed, Tensor):
    """A tensor of the whole shape that holds only this rank's boxes, for DCP to fill or read."""

    @staticmethod
    def __new__(cls, local: Tensor, held: Sequence[Box], whole_shape: Sequence[int]) -> WholeOnDisk:
        self = Tensor._make_wrapper_subclass(
            cls, tuple(whole_shape), dtype=local.dtype, device=local.device
        )
        self._shard, self._boxes = local.detach(), tuple(held)
        self._whole_shape = tuple(whole_shape)
        return self

    def __init__(self, local: Tensor, held: Sequence[Box], whole_shape: Sequence[int]) -> None:
        """`__new__` sets everything, as tensor subclasses require."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a tensor that only stands for boxes on disk")


class BoxedLocal(_Boxed, Tensor):
    """A local tensor that knows its boxes; any operator on it gives a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(
        local: Tensor, held: Sequence[Box], whole_shape: Sequence[int], is_written: bool = True
    ) -> BoxedLocal:
        """Unless `is_written`, DCP loads into it but never saves it: another rank does."""
        self = local.detach().as_subclass(BoxedLocal)
        self._shard, self._boxes = local.detach(), tuple(held)
        self._whole_shape, self._is_written = tuple(whole_shape), is_written
        return self


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
