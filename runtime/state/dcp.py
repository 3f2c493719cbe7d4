"""A DTensor's local tensor as `torch.distributed.checkpoint` (DCP) takes it: one chunk per box.

DCP takes a DTensor's shard for one box that begins at its first element. A strided shard is
several boxes. Saving one fails (overlapping chunks), and loading one silently fills it with other
rows. But DCP asks a local tensor with its `_Checkpointable` protocol for chunks. So what users
save of `pm.state_dict()` has chunks that any mesh or plan can read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.tensors import Box, Boxed, Chunks


class BoxedLocal(Boxed, Tensor):
    """A local tensor that knows its boxes; any operator on it gives a plain tensor.

    It is that of a DTensor whose shard is strided, or a mirror of what another stage saves.
    """

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
