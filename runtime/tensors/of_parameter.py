"""`OfParameter`: a whole value computed from one sharded parameter.

With several stages, no rank has all parameters. Two such values are then never combined, and none
becomes a Python number, because a sum over the parameters of one stage is not the sum over all.
A view of a gathered parameter stays one: written to, it changes the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from autopar.errors import NotSupportedError
from autopar.runtime.tensors.memory import Memory

aten = torch.ops.aten


@dataclass
class Gathered:
    """A gathered copy of a shard's whole tensor, of which views exist; both have equal values."""

    base: Memory
    whole: Tensor
    version: int

    def refresh(self) -> None:
        """Gather again if the shard has changed."""
        if self.base.local._version != self.version:
            self.whole.copy_(self.base.spread.whole(self.base.local.detach()))
            self.version = self.base.local._version

    def write_back(self) -> None:
        local = self.base.local.detach()
        local.copy_(self.base.spread.local(self.whole))
        increment_version(self.base.local)
        self.version = self.base.local._version


class OfParameter(Tensor):
    """A whole value computed from the parameter `name`: a norm, or a view of the gathered tensor.

    gathered   what it is a view of: written to, it changes the shard
    n_stages   with several, it is not combined with values of other parameters
    """

    value: Tensor
    name_of: str
    n_stages: int
    gathered: Gathered | None

    @staticmethod
    def __new__(
        cls, value: Tensor, name_of: str, n_stages: int, gathered: Gathered | None = None
    ) -> OfParameter:
        self = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device
        )
        self.value, self.name_of = value, name_of
        self.n_stages, self.gathered = n_stages, gathered
        return self

    def __init__(
        self, value: Tensor, name_of: str, n_stages: int, gathered: Gathered | None = None
    ) -> None:
        """`__new__` sets everything, as tensor subclasses require."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: object = None
    ) -> str:
        return f"of `{self.name_of}`: {self.current()!r}"

    def current(self) -> Tensor:
        """The value; of a view, as its shard is now."""
        if self.gathered is not None:
            self.gathered.refresh()
        return self.value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, Memory) for t in types):
            return NotImplemented
        own = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, OfParameter)]
        first = own[0]
        if first.n_stages > 1:
            check_one_parameter(func, {v.name_of for v in own})
            if func is aten._local_scalar_dense.default:
                raise of_one_stage(f"a Python number from `{first.name_of}`")
        plain_args, plain_kwargs = pytree.tree_map_only(
            OfParameter, lambda v: v.current(), (tuple(args), kwargs)
        )
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            for target in written(func, args, kwargs):
                if isinstance(target, OfParameter):
                    if target.gathered is not None:
                        target.gathered.write_back()
                elif first.n_stages > 1:
                    raise of_one_stage(f"`{func}` into a plain tensor")
            return args[0] if func._schema.returns else None
        gathered = first.gathered if is_view(func) else None
        return of_parameter(result, first.name_of, first.n_stages, gathered)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operator changes, flat."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def is_view(func: Any) -> bool:
    return any(r.alias_info is not None for r in func._schema.returns)


def of_parameter(result: Any, name: str, n_stages: int, gathered: Gathered | None = None) -> Any:
    """Mark results where that matters: with several stages, and views of gathered tensors."""
    if n_stages == 1 and gathered is None:
        return result
    return pytree.tree_map_only(
        Tensor, lambda value: OfParameter(value, name, n_stages, gathered), result
    )


def check_one_parameter(func: Any, names: set[str]) -> None:
    if len(names) > 1:
        raise of_one_stage(f"`{func}` of values of {len(names)} parameters")


def of_one_stage(what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what}: with pipeline stages, a rank has the parameters of its own stage only",
        hint="pm.clip_grad_norm_(c) clips by the norm over all stages, and returns it",
    )
