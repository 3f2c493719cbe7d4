"""The memory of a sharded tensor: its shard, the whole, `data`, `numpy()`, pickles of it.

torch runs no operator for these, so `__torch_dispatch__` does not see them. Torch's own setter of
`data` would fill the wrapper, which no program reads.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from autopar.errors import NotSupportedError
from autopar.runtime.tensors.spread import Spread

_BY_POSITION = "torch.nn.utils.convert_parameters"  # `vector_to_parameters` counts elements


class Memory(Tensor):
    """Base of `Sharded`."""

    local: Tensor
    spread: Spread

    @abstractmethod
    def cut(self, value: Tensor) -> Tensor:
        """The shard of a tensor of this shape."""

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank of its stage; all of them must call it."""
        return self.spread.whole(self.local.detach()).clone()

    def to_local(self) -> Tensor:
        """This rank's shard, as a plain tensor that shares its memory."""
        return self.local.detach()

    @property
    def data(self) -> Tensor:
        """The tensor without its history, in the same memory."""
        found: Tensor = torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the memory of `value` for this shard; of a plain tensor, of the shard in it."""
        spread = self.spread
        if tuple(value.shape) != spread.shape or value.dtype != self.dtype:
            raise NotSupportedError(
                f"`data` of `{spread.name}`, of shape {spread.shape} and {self.dtype}, set to a "
                f"tensor of shape {tuple(value.shape)} and {value.dtype}",
                hint="change shapes and dtypes of the model before autopar.parallelize",
            )
        if spread.n_stages > 1 and sys._getframe(1).f_globals.get("__name__") == _BY_POSITION:
            raise NotSupportedError(
                "vector_to_parameters: with pipeline stages, a rank has the parameters of its own "
                "stage only, and would take the first values for them",
                hint="pm.load_state_dict(tensors by name)",
            )
        self.local.data = self.cut(value.detach()).contiguous()
        increment_version(self.local)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedError(
            f"saving `{self.spread.name}`, of which this rank has a shard",
            hint="autopar.save(pm, optimizer, path) saves weights and optimizer state; of weights "
            "alone, torch.save(pm.full_state_dict(), path) on rank 0, with every rank calling "
            "full_state_dict()",
        )

    def untyped_storage(self) -> NoReturn:
        """Raise `NotSupportedError`: the memory is that of the shard, `to_local()`."""
        self._no_storage("untyped_storage()")

    def storage(self) -> NoReturn:
        """Raise `NotSupportedError`: the memory is that of the shard, `to_local()`."""
        self._no_storage("storage()")

    def share_memory_(self) -> NoReturn:
        """Raise `NotSupportedError`: programs and optimizers hold the memory that there is."""
        self._no_storage("share_memory_()")

    def _no_storage(self, what: str) -> NoReturn:
        raise NotSupportedError(
            f"{what} of `{self.spread.name}`, of which this rank has a shard: the tensor itself "
            "has no memory",
            hint="the shard's memory is that of p.to_local(); write with p.copy_(value) under "
            "torch.no_grad(); other processes get whole tensors from pm.full_state_dict()",
        )

    def expand_as(self, other: Tensor) -> Tensor:
        """As of any tensor; raises `NotSupportedError` for `p.expand_as(p)`.

        Scripts write that only to reach the node that accumulates the gradient.
        """
        if other is self:
            raise NotSupportedError(
                f"expand_as of `{self.spread.name}` and itself: hooks on the node that accumulates "
                "its gradient would not run, since pm.step accumulates in shards",
                hint="p.register_post_accumulate_grad_hook(fn), which runs after the step",
            )
        return super().expand_as(other)

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array; raises `NotSupportedError` where a rank has a shard."""
        return self._whole("numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """The whole tensor as lists; raises `NotSupportedError` where a rank has a shard."""
        return self._whole("tolist()").tolist()

    def _whole(self, what: str) -> Tensor:
        spread = self.spread
        if spread.n_stages > 1 or not (spread.is_whole or spread.may_gather):
            raise NotSupportedError(
                f"{what} of `{spread.name}`: this rank has a shard of it, or parameters of its own "
                "stage only",
                hint="whole tensors are in pm.full_state_dict() and pm.full_gradients(), and in "
                "full_tensor(); all ranks call these",
            )
        return self.local if spread.is_whole else self.full_tensor()
