"""How `torch.distributed.checkpoint` (DCP) reads and writes a shard: one chunk per box.

DCP takes a DTensor's shard for one box that begins at its first element. A strided shard is
several boxes. But DCP asks any tensor with its `_Checkpointable` protocol for chunks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autopar.errors import VerificationError
from autopar.runtime.tensors.sharding import Box


class Chunks(NamedTuple):
    """A shard, and where its boxes lie in the whole tensor.

    is_written: if not, DCP loads into the shard but never saves it, because another rank does.
    """

    shard: Tensor
    boxes: tuple[Box, ...]
    whole_shape: tuple[int, ...]
    is_written: bool = True


class Boxed:
    """DCP's protocol over the boxes of a shard."""

    @abstractmethod
    def chunks(self) -> Chunks:
        """What DCP reads or writes on this rank."""

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        held = self.chunks()
        if not held.is_written:
            return []
        properties = TensorProperties.create_from_tensor(held.shard)
        whole = torch.Size(held.whole_shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = self.chunks().boxes
        return [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.sizes)) for b in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The view of the shard that holds the box at `index.offset`."""
        start = tuple(index.offset) if index.offset is not None else None
        held = self.chunks()
        for box in held.boxes:
            if start is None or box.start == start:
                return held.shard[box.of_shard]
        raise VerificationError(f"no part of `{index.fqn}` starts at {start} on this rank")
