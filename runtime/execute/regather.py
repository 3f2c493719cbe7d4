"""ZeRO-3 gathers: a gathered parameter is not saved for backward, but gathered again there.

While a microbatch's forward runs, saved-tensor hooks see each tensor that autograd saves. A
tensor that shares storage with a gathered parameter is replaced by a note: which parameter, and
which view of it. When backward needs the tensor, the stored shard is gathered again. All ranks
run the same graph, so they gather in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.groups import phase


@dataclass(frozen=True)
class _Note:
    """How to make a view of a gathered parameter again."""

    stored: Tensor
    convert: Callable[[Tensor], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Regather:
    """Gathers parameters without keeping them; one per executor."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Tensor], Tensor, Callable[[Tensor], Tensor]]] = {}

    def gathered(self, stored: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """The parameter in use, made from its stored shard by `convert`."""
        with phase("param_gather"):
            whole = convert(stored)
        self._live[whole.untyped_storage().data_ptr()] = (weakref.ref(whole), stored, convert)
        return whole

    def hooks(self) -> Any:
        """Context for a forward whose gathered parameters are not saved."""
        self._live.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Note:
        entry = self._live.get(tensor.untyped_storage().data_ptr())
        if entry is None or entry[0]() is None:
            return tensor
        _, stored, convert = entry
        return _Note(stored, convert, tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def _unpack(saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad(), phase("param_gather"):
            whole = saved.convert(saved.stored.detach())
        return whole.as_strided(saved.size, saved.stride, saved.offset)
