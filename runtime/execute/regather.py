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
from torch.autograd.function import once_differentiable

from autopar.runtime.groups import phase

Convert = Callable[[Tensor], Tensor]


class _Gathered(torch.autograd.Function):
    """`convert` forward; backward casts the gradient to `reduce_dtype`, and then `back`."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, convert: Convert, back: Convert, reduce_dtype: torch.dtype
    ) -> Tensor:
        ctx.back, ctx.reduce_dtype = back, reduce_dtype
        return convert(shard.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        with phase("grad_sync"):
            return ctx.back(gradient.to(ctx.reduce_dtype)), None, None, None


@dataclass(frozen=True)
class _Note:
    """How to make a view of a gathered parameter again."""

    shard: Tensor
    convert: Convert
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Regather:
    """Gathers parameters without keeping them; one per executor."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[weakref.ref[Tensor], Tensor, Convert]] = {}

    def gathered(
        self, shard: Tensor, convert: Convert, back: Convert | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """The parameter in use, made from its shard by `convert`.

        In mixed precision, `back` takes its gradient in `reduce_dtype` to the shard.
        """
        with phase("param_gather"):
            if back is None:
                whole = convert(shard)
            else:
                whole = _Gathered.apply(shard, convert, back, reduce_dtype)
        self._live[whole.untyped_storage().data_ptr()] = (weakref.ref(whole), shard, convert)
        return whole

    def hooks(self) -> Any:
        """Context for a forward whose gathered parameters are not saved."""
        self._live.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Note:
        entry = self._live.get(tensor.untyped_storage().data_ptr())
        if entry is None or entry[0]() is None:
            return tensor
        _, shard, convert = entry
        return _Note(shard, convert, tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def _unpack(saved: Tensor | _Note) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad(), phase("param_gather"):
            whole = saved.convert(saved.shard.detach())
        return whole.as_strided(saved.size, saved.stride, saved.offset)
