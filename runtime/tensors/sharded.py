"""`Sharded`: a whole tensor of which this rank keeps a shard. `pm.parameters()` are such tensors.

It behaves as the whole tensor does in one process, so that code of users means what it says:

    shape, numel          of the whole tensor
    elementwise           on the shard alone: no communication. An operand that is whole on every
                          rank is cut as the result is; one that is cut otherwise is gathered, as
                          below
    sum, norm, max, ...   of the whole tensor: one all_reduce of one number
    anything else         needs the whole tensor: gathered if the user allows it for this
                          parameter (`optimizer_gather=`), else refused

So an elementwise optimizer is a ZeRO optimizer, `torch.nn.utils.clip_grad_norm_` sees the norm of
the whole gradient, and an optimizer that multiplies matrices is refused or exact; no list of
optimizers decides that. A plain tensor beside a `Sharded` one is whole, equal on every rank, and is
cut to the shard.

A value computed from one parameter may be an `OfParameter` (`of_parameter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils import _pytree as pytree

from autopar.errors import NotSupportedError
from autopar.runtime.tensors.boxed import Boxed, Chunks
from autopar.runtime.tensors.memory import Memory
from autopar.runtime.tensors.of_parameter import (
    Gathered,
    OfParameter,
    check_one_parameter,
    is_view,
    of_one_stage,
    of_parameter,
    written,
)
from autopar.runtime.tensors.operators import Kind, Reduction, kind_of, reduction_of, step_of_norm
from autopar.runtime.tensors.spread import Spread, spread_of_result

aten = torch.ops.aten


class Sharded(Memory, Boxed):
    """A whole tensor of shape `spread.shape`; `local` is this rank's shard.

    is_used: an optimizer has used the gradient of this parameter
    """

    local: Tensor
    spread: Spread
    is_used: bool = False

    @staticmethod
    def __new__(cls, local: Tensor, spread: Spread) -> Sharded:
        self = Tensor._make_wrapper_subclass(
            cls, spread.shape, dtype=local.dtype, device=local.device
        )
        self.local, self.spread = local, spread
        return self

    def __init__(self, local: Tensor, spread: Spread) -> None:
        """`__new__` sets everything, as tensor subclasses require."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _HANDLERS[kind_of(func)](func, args, kwargs or {})

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: object = None
    ) -> str:
        here = tuple(self.local.shape)
        kind = "Parameter" if getattr(self, "_is_param", False) else "tensor"
        return (
            f"{kind} `{self.spread.name}` of shape {tuple(self.shape)}, {here} on this rank "
            f"({self.spread}), {str(self.dtype).removeprefix('torch.')}:\n{self.local.detach()!r}"
        )

    def cut(self, value: Tensor) -> Tensor:
        local: Tensor = _cut_to(self.spread, "data")(value)
        return local

    def chunks(self) -> Chunks:
        return Chunks(self.local.detach(), self.spread.boxes(), self.spread.shape)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.spread.n_stages > 1 and self.spread.name not in fqn:
            raise NotSupportedError(
                f"saving state of `{self.spread.name}` as `{fqn}`: each pipeline stage counts its "
                "own parameters, so stages would save different tensors under one name",
                hint="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(pm, "
                "optimizer) names state by parameter; so does autopar.save",
            )
        return super().__create_write_items__(fqn, _)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        if id(self) not in memo:
            local = self.local.detach().clone()
            copied: Any = Sharded(local, self.spread)
            if getattr(self, "_is_param", False):
                copied = as_parameter(copied, self.requires_grad)
            if isinstance(self.grad, Sharded):
                copied.grad = Sharded(self.grad.local.detach().clone(), self.grad.spread)
            memo[id(self)] = copied
        return memo[id(self)]


def as_parameter(tensor: Sharded, requires_grad: bool) -> torch.nn.Parameter:
    """A `Sharded` leaf that modules and optimizers take for a parameter."""
    made = torch.nn.Parameter(tensor, requires_grad)
    assert isinstance(made, Sharded)
    made.local.requires_grad_(requires_grad)
    return made


def stored_parameter(local: Tensor, spread: Spread, requires_grad: bool) -> torch.nn.Parameter:
    """The parameter whose shard is `local`; `.local` is a leaf that a program may differentiate."""
    return as_parameter(Sharded(local.detach(), spread), requires_grad)


def local_of(value: Any) -> Any:
    """The shard of a `Sharded` tensor; anything else as it is."""
    return value.local if isinstance(value, Sharded) else value


def _spreads(values: Any) -> list[Spread]:
    return [v.spread for v in pytree.tree_leaves(values) if isinstance(v, Sharded)]


def _cut_to(spread: Spread, func: Any) -> Callable[[Any], Any]:
    """How an elementwise operator on shards of `spread` takes each of its arguments."""

    def cut(value: Any) -> Any:
        if isinstance(value, Sharded):
            if value.spread is spread or value.spread.cut == spread.cut:
                return value.local
            value = _whole_to_cut(value, spread, func)
        if isinstance(value, OfParameter):
            if value.n_stages > 1:
                check_one_parameter(func, {spread.name, value.name_of})
            value = value.current()
        if isinstance(value, Tensor):
            return value if value.dim() == 0 or spread.is_whole else spread.local(value)
        if isinstance(value, (list, tuple)):
            return type(value)([cut(v) for v in value])
        return value

    return cut


def _whole_to_cut(value: Sharded, to: Spread, func: Any) -> Tensor:
    """The whole of an operand that is cut otherwise than the result."""
    own = value.spread
    if not own.is_whole and not own.may_gather:
        raise NotSupportedError(
            f"`{func}` of `{to.name}` ({to}) and `{own.name}` ({own}): this rank has other parts "
            "of the two",
            hint=f'optimizer_gather=["{own.name}"] gathers it for that, as autopar plans; or write '
            "`.full_tensor()` of it, on all ranks",
        )
    return own.whole(value.local.detach())


def _result_spread(func: Any, args: Any, kwargs: Any) -> Spread | None:
    """The spread of what an elementwise operator returns or writes; None for a whole result."""
    targets = written(func, args, kwargs) if func._schema.is_mutable else []
    if targets:
        first = targets[0].spread if isinstance(targets[0], Sharded) else None
        return first if all(isinstance(t, Sharded) for t in targets) else None
    tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    return _spread_of(tensors)


def _spread_of(operands: Sequence[Any]) -> Spread | None:
    """The spread of an elementwise result of these operands."""
    tensors = [v for v in operands if isinstance(v, Tensor)]
    spreads = [v.spread for v in tensors if isinstance(v, Sharded)]
    if not spreads:
        return None
    if all(tuple(v.shape) in ((), spreads[0].shape) for v in tensors):
        return spread_of_result(spreads, spreads[0].shape)
    return spread_of_result(spreads, torch.broadcast_shapes(*(v.shape for v in tensors)))


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    is_mutable = func._schema.is_mutable
    spread = _result_spread(func, args, kwargs)
    if spread is None:
        return _gathered(func, args, kwargs)
    cut = _cut_to(spread, func)
    locals_ = [cut(a) for a in args]
    local_kwargs = {k: cut(v) for k, v in kwargs.items()} if kwargs else kwargs
    if is_mutable:
        func(*locals_, **local_kwargs)
        # Below autograd, torch does not count writes.
        increment_version([target.local for target in written(func, args, kwargs)])
        return _returned(func, args, kwargs)
    return _wrapped(func(*locals_, **local_kwargs), spread)


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator that writes returns: the tensor that it writes, which `out=` may name."""
    if not func._schema.returns:
        return None
    targets = written(func, args, kwargs)
    is_out = len(targets) == 1 and func._schema.returns[0].alias_info is not None
    return targets[0] if is_out else args[0]


def _wrapped(result: Any, spread: Spread) -> Any:
    if isinstance(result, Tensor):
        return Sharded(result, spread)
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(r, spread) for r in result])
    return result


def _elementwise_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """A `_foreach_` or `_fused_` operator: the i-th items of all lists belong together."""
    lists = [a for a in args if isinstance(a, (list, tuple))]
    n_items = max(len(a) for a in lists)
    items = [[a[i] for a in lists if i < len(a)] for i in range(n_items)]
    is_mutable = func._schema.is_mutable
    spreads = [
        item[0].spread if is_mutable and isinstance(item[0], Sharded) else _spread_of(item)
        for item in items
    ]
    if any(at is None and _spreads(item) for at, item in zip(spreads, items, strict=True)):
        return _gathered(func, args, kwargs)

    def cut(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == n_items:
            pairs = zip(value, spreads, strict=True)
            return [v if at is None else _cut_to(at, func)(v) for v, at in pairs]
        return value.current() if isinstance(value, OfParameter) else value

    several = next((at.n_stages for at in spreads if at is not None), 1) > 1
    if several and any(isinstance(v, OfParameter) for v in (*args, *kwargs.values())):
        raise of_one_stage(f"`{func}` with a value of one parameter")
    if is_mutable:
        _check_written(func, args, kwargs, spreads)
    result = func(*map(cut, args), **{k: cut(v) for k, v in kwargs.items()})
    if is_mutable:
        increment_version([local_of(target) for target in written(func, args, kwargs)])
        return None
    pairs = zip(result, spreads, strict=True)
    return [r if at is None else Sharded(r, at) for r, at in pairs]


def _check_written(func: Any, args: Any, kwargs: Any, spreads: Sequence[Spread | None]) -> None:
    """Raise `NotSupportedError` for a whole tensor that would be changed beside a shard."""
    for k, value in enumerate(written(func, args, kwargs)):
        at = spreads[k % len(spreads)]
        is_whole = isinstance(value, Tensor) and not isinstance(value, Sharded) and value.dim()
        if is_whole and at is not None and not at.is_whole:
            raise NotSupportedError(
                f"`{func}` into a whole tensor beside `{at.name}`, of which this rank has a shard",
                hint="make it like the parameter: torch.zeros_like(parameter)",
            )


def _masked(func: Any, args: Any, kwargs: Any) -> Any:
    """`x[mask] = number`: elementwise, if the mask is cut as x."""
    target, indices, values = args[:3]
    if isinstance(target, Sharded) and len(indices) == 1 and values.dim() == 0:
        (mask,) = indices
        if isinstance(mask, Sharded) and mask.dtype is torch.bool:
            return _elementwise(func, args, kwargs)
    return _gathered(func, args, kwargs)


def _same_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """`view`, `expand` and the like: elementwise if they keep the whole shape."""
    spread = args[0].spread if isinstance(args[0], Sharded) else None
    if spread is not None and tuple(args[1]) == spread.shape:
        return Sharded(args[0].local.view_as(args[0].local), spread)
    return _gathered(func, args, kwargs)


def _new_tensor(func: Any, args: Any, kwargs: Any) -> Any:
    """`new_zeros` and the like: cut alike if they have the whole shape, else plain."""
    source = args[0]
    if tuple(args[1]) != source.spread.shape or (len(args) > 2 and "strided" not in str(func)):
        return func(source.local, *args[1:], **kwargs)
    shape = list(source.local.shape)
    if "strided" in str(func):
        return Sharded(source.local.new_empty(shape, **kwargs), source.spread)
    return Sharded(func(source.local, shape, *args[2:], **kwargs), source.spread)


def _reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """A sum, norm, extreme or truth of a whole tensor; over some dims only, it is gathered."""
    spread = _spreads((args, kwargs))[0]
    reduction = reduction_of(func, args, kwargs, spread.shape)
    if spread.is_whole or reduction is None or not isinstance(args[0], Sharded):
        return _gathered(func, args, kwargs)
    return of_parameter(_reduce(reduction, args[0]), spread.name, spread.n_stages)


def _reduce(reduction: Reduction, tensor: Sharded) -> Tensor:
    spread = tensor.spread
    part = reduction.part(spread.inside(tensor.local))
    return reduction.finish(spread.reduce(part, reduction.op), spread.shape, tensor.dtype)


def _norms(func: Any, args: Any, kwargs: Any) -> Any:
    """`_foreach_norm`: the norm of each tensor, with one all_reduce for all that are cut alike."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    norm = step_of_norm(float(order), kwargs.get("dtype"))
    out: list[Any] = [None] * len(args[0])
    waiting: dict[tuple[int, ...], list[int]] = {}
    for i, tensor in enumerate(args[0]):
        if isinstance(tensor, Sharded) and not tensor.spread.is_whole:
            waiting.setdefault(tensor.spread.shard_axes, []).append(i)
        else:
            local = tensor.local if isinstance(tensor, Sharded) else tensor
            value = torch.linalg.vector_norm(
                local.detach(), float(order), dtype=kwargs.get("dtype")
            )
            out[i] = value
    for positions in waiting.values():
        tensors = [args[0][i] for i in positions]
        parts = [norm.part(t.spread.inside(t.local)) for t in tensors]
        dtype = max((p.dtype for p in parts), key=lambda d: d.itemsize)
        joint = torch.stack([p.to(dtype) for p in parts])
        sums = tensors[0].spread.reduce(joint, norm.op)
        for i, tensor, total in zip(positions, tensors, sums.unbind(), strict=True):
            out[i] = norm.finish(total, tensor.spread.shape, tensor.dtype)
    return [
        of_parameter(value, t.spread.name, t.spread.n_stages) if isinstance(t, Sharded) else value
        for value, t in zip(out, args[0], strict=True)
    ]


def _gathered(func: Any, args: Any, kwargs: Any) -> Any:
    """Any operator, on whole tensors: those that every rank has, or may gather."""
    spreads = _spreads((args, kwargs))
    for spread in spreads:
        if not spread.is_whole and not spread.may_gather:
            raise NotSupportedError(
                f"`{func}` needs the whole of `{spread.name}`, of which this rank has a shard "
                f"({spread})",
                hint=f'optimizer_gather=["{spread.name}"] gathers it for that, as autopar plans; '
                "pm.full_state_dict() has whole tensors, forbid= may keep it unsharded",
            )
    first = spreads[0]
    if first.n_stages > 1:
        values = pytree.tree_leaves((args, kwargs))
        own = {v.name_of for v in values if isinstance(v, OfParameter)}
        check_one_parameter(func, own | {spread.name for spread in spreads})
    gathered: dict[int, Gathered] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, Sharded) and not value.spread.is_whole:
            copy = value.spread.whole(value.local.detach())
            gathered[id(value)] = Gathered(value, copy, value.local._version)
            return copy
        return value.current() if isinstance(value, OfParameter) else local_of(value)

    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, whole, (tuple(args), dict(kwargs)))
    result = func(*plain_args, **plain_kwargs)
    if func._schema.is_mutable:
        for target in written(func, args, kwargs):
            if isinstance(target, Sharded):
                if id(target) in gathered:
                    gathered[id(target)].write_back()
            elif isinstance(target, OfParameter):
                if target.gathered is not None:
                    target.gathered.write_back()
            elif first.n_stages > 1:
                raise of_one_stage(f"`{func}` into a plain tensor")
        return _returned(func, args, kwargs)
    viewed = gathered.get(id(args[0])) if is_view(func) else None
    return of_parameter(result, first.name, first.n_stages, viewed)


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers: each rank would draw its own, so copies and shards would drift apart."""
    spread = _spreads((args, kwargs))[0]
    if spread.n_ranks > 1 or spread.n_stages > 1:
        raise NotSupportedError(
            f"`{func}` of `{spread.name}`: every rank would draw other numbers",
            hint="initialise the model before autopar.parallelize, or draw a whole tensor from a "
            "torch.Generator with one seed on all ranks, and copy_ it",
        )
    return _gathered(func, args, kwargs)


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Ranks hold different shards, stages different parameters; and both are synchronised."""
    raise NotSupportedError(
        f"`{func}` of `{_spreads((args, kwargs))[0].name}`: torch.distributed on a parameter of a "
        "parallel module, or on its gradient",
        hint="leave it out: pm.step synchronises gradients, and parameters are the same on all "
        "ranks; pm.full_state_dict() and pm.full_gradients() have whole tensors",
    )


_HANDLERS: dict[Kind, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    "elementwise": _elementwise,
    "lists": _elementwise_lists,
    "masked": _masked,
    "same shape": _same_shape,
    "new": _new_tensor,
    "reduction": _reduced,
    "norms": _norms,
    "random": _random,
    "collective": _collective,
    "whole": _gathered,
}
