"""What an operator needs of a sharded tensor: the shard, a reduction over ranks, or the whole.

Elementwise operators have torch's own tag `pointwise`; few more are listed here. A reduction of a
whole tensor x over shards x_r is

    part     a value of each shard                     |x_r|^q summed, max(x_r), ...
    op       how the values of ranks combine           "sum" or "max"
    finish   the result from the combination           (sum)^(1/q), ...

`reduction_of` gives these three. Sums of low precision are kept in float32 until they are finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from autopar.runtime.groups import ReduceOp
from autopar.runtime.tensors.spread import wide

Kind = Literal[
    "elementwise",
    "lists",
    "masked",
    "same shape",
    "new",
    "reduction",
    "norms",
    "random",
    "whole",
    "communication",
]
aten = torch.ops.aten

# Elementwise, but without the tag: copies, casts, tensors like another.
_ELEMENTWISE = frozenset(
    {
        aten.detach,
        aten.alias,
        aten.clone,
        aten.copy_,
        aten.copy,
        aten._to_copy,
        aten.zero_,
        aten.fill_,
        aten.fill,
        aten.zeros_like,
        aten.ones_like,
        aten.empty_like,
        aten.full_like,
        aten.lift_fresh,
        aten.lerp_,
        aten.lerp,
        aten.masked_fill,
        aten.masked_fill_,
    }
)
_SAME_SHAPE = frozenset({aten.view, aten._unsafe_view, aten.expand, aten.reshape})
_NEW = frozenset(
    {aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full, aten.new_empty_strided}
)
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_LIST_PREFIX = "_foreach_"
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


@dataclass(frozen=True)
class Reduction:
    """One reduction of a whole tensor; `finish` takes the combination, the shape and dtype."""

    part: Callable[[Tensor], Tensor]
    op: ReduceOp
    finish: Callable[[Tensor, Sequence[int], torch.dtype], Tensor]


@cache
def kind_of(func: torch._ops.OpOverload) -> Kind:
    """What to do for an operator with a sharded argument."""
    packet, name = func.overloadpacket, func._schema.name.removeprefix("aten::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    if func.namespace in _COMMUNICATION:
        return "communication"
    if name in _FUSED:
        return "lists"
    if name.startswith(_LIST_PREFIX):
        if name == "_foreach_norm":
            return "norms"
        return "lists" if _is_elementwise_list(name) else "whole"
    if packet in (aten.index_put_, aten.index_put):
        return "masked"
    if packet in _SAME_SHAPE:
        return "same shape"
    if packet in _NEW:
        return "new"
    if packet in _REDUCTIONS:
        return "reduction"
    if torch.Tag.pointwise in func.tags or packet in _ELEMENTWISE:
        return "elementwise"
    return "whole"


def _is_elementwise_list(name: str) -> bool:
    """Is the operator that `_foreach_NAME` repeats elementwise?"""
    base = getattr(aten, name.removeprefix(_LIST_PREFIX), None)
    if base is None or base in _REDUCTIONS:
        return False
    if base in _ELEMENTWISE:
        return True
    return any(torch.Tag.pointwise in getattr(base, o).tags for o in base.overloads())


def step_of_norm(order: float, dtype: torch.dtype | None = None) -> Reduction:
    """The vector norm of an order; for inf and -inf the extreme, for 0 the count of non-zeros."""

    def result(value: Tensor, shape: Sequence[int], own: torch.dtype) -> Tensor:
        return value.to(dtype or own)

    if math.isinf(order):
        sign = math.copysign(1.0, order)
        empty = 0.0 if sign > 0 else math.inf

        def part(x: Tensor) -> Tensor:
            if not x.numel():
                return torch.full((), sign * empty, dtype=x.dtype, device=x.device)
            return sign * torch.linalg.vector_norm(x, order)

        return Reduction(part, "max", lambda v, shape, own: result(sign * v, shape, own))

    def powers(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, order, dtype=dtype or wide(x.dtype)).double()
        return norm if order == 0 else norm.pow(order)

    def root(total: Tensor, shape: Sequence[int], own: torch.dtype) -> Tensor:
        return result(total if order == 0 else total.pow(1.0 / order), shape, own)

    return Reduction(powers, "sum", root)


def reduction_of(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
) -> Reduction | None:
    """The reduction that a call asks for; None if it keeps some dims."""
    bound = {
        a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
        for i, a in enumerate(func._schema.arguments)
    }
    dims = bound.get("dim")
    named = [dims] if isinstance(dims, int) else list(dims or ())
    if bound.get("keepdim") or (named and {d % len(shape) for d in named} != {*range(len(shape))}):
        return None
    return _REDUCTIONS[func.overloadpacket](bound)


def _sum(bound: Mapping[str, Any]) -> Reduction:
    dtype = bound.get("dtype")
    return Reduction(
        lambda x: x.sum(dtype=dtype or (wide(x.dtype) if x.is_floating_point() else None)),
        "sum",
        lambda v, shape, own: v.to(dtype or (own if own.is_floating_point else v.dtype)),
    )


def _mean(bound: Mapping[str, Any]) -> Reduction:
    dtype = bound.get("dtype")
    return Reduction(
        lambda x: x.sum(dtype=dtype or wide(x.dtype)),
        "sum",
        lambda v, shape, own: (v / math.prod(shape)).to(dtype or own),
    )


def _extreme(sign: int) -> Callable[[Mapping[str, Any]], Reduction]:
    """The maximum, or with sign -1 the minimum; an empty shard gives the other end."""

    def part(x: Tensor) -> Tensor:
        if not x.numel():
            low = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min + 1
            return torch.full((), low, dtype=x.dtype, device=x.device)
        return x.max() if sign > 0 else -x.min()

    def reduction(bound: Mapping[str, Any]) -> Reduction:
        return Reduction(part, "max", lambda v, shape, own: v if sign > 0 else -v)

    return reduction


def _any(bound: Mapping[str, Any]) -> Reduction:
    return Reduction(
        lambda x: x.any().to(torch.int64), "max", lambda v, shape, own: v.to(torch.bool)
    )


def _all(bound: Mapping[str, Any]) -> Reduction:
    return Reduction(
        lambda x: (~x.bool()).any().to(torch.int64), "max", lambda v, shape, own: v == 0
    )


def _count(bound: Mapping[str, Any]) -> Reduction:
    return Reduction(lambda x: x.count_nonzero(), "sum", lambda v, shape, own: v)


def _vector_norm(bound: Mapping[str, Any]) -> Reduction:
    order = bound.get("ord", bound.get("p", 2))
    return step_of_norm(2.0 if order is None else float(order), bound.get("dtype"))


_REDUCTIONS: dict[Any, Callable[[Mapping[str, Any]], Reduction]] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.max: _extreme(1),
    aten.amax: _extreme(1),
    aten.min: _extreme(-1),
    aten.amin: _extreme(-1),
    aten.any: _any,
    aten.all: _all,
    aten.count_nonzero: _count,
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _vector_norm,
}
