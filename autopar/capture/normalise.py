"""One walk over the traced graph: regions inlined, operators in canonical form.

No-grad regions (`wrap_with_set_grad_enabled`) are inlined; a value that carries gradient is
detached where it enters one, so that `has_grad` says the same as eager autograd. Assertions
disappear. Everything else goes through the table in `rewrites.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, Call
from autopar.capture.inplace import WAS_IN_PLACE
from autopar.capture.names import source_line
from autopar.capture.rewrites import rewrite_of
from autopar.errors import NotSupportedError

aten = torch.ops.aten
ASSERTIONS = frozenset(
    {
        aten._assert_tensor_metadata,
        aten._assert_scalar,
        aten._assert_async,
        aten.sym_constrain_range,
        aten.sym_constrain_range_for_size,
    }
)
# Return the input itself, not a view of it, when there is nothing to do.
RETURNS_INPUT = frozenset({aten.to, aten.type_as, aten.dropout, aten.contiguous})


def normalise(
    module: fx.GraphModule, builder: Builder, placeholders: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Emit `module`'s graph into `builder`; returns its output leaves as nodes of the new graph.

    `placeholders` maps the traced placeholders to new nodes or baked-in values.
    """
    env: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        builder.origin = node
        if node.op == "placeholder":
            env[node] = placeholders[node.name]
        elif node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], lambda n: env[n]))
        else:
            args, kwargs = _substitute((node.args, node.kwargs), env)
            env[node] = _emit(builder, node, args, kwargs)
    raise AssertionError("a graph without output")


def _substitute(value: Any, env: Mapping[fx.Node, Any]) -> Any:
    """Like `fx.node.map_arg`, but values may be tuples and modules."""
    if isinstance(value, fx.Node):
        return env[value]
    if isinstance(value, (list, tuple)):
        return type(value)(_substitute(v, env) for v in value)
    if isinstance(value, dict):
        return {k: _substitute(v, env) for k, v in value.items()}
    return value


def _emit(builder: Builder, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.target is operator.getitem:
        return builder.getitem(args[0], args[1])
    if not isinstance(node.target, torch._ops.OpOverload):
        return _inline(builder, node, args)
    if node.target.overloadpacket in ASSERTIONS:
        return None
    call = Call(node.target, args, dict(kwargs), node)
    in_place = node.meta.get(WAS_IN_PLACE, False)
    rewrite = rewrite_of(node.target)
    result = rewrite(builder, call) if rewrite is not None else None
    if result is None:
        result = builder.emit(node.target, args, dict(kwargs), None if in_place else node)
    if in_place:  # an in-place result keeps the dtype of what it overwrites
        assert isinstance(result, fx.Node)
        wanted = builder.dtype(node.meta["val"].dtype)
        if result.meta["val"].dtype != wanted:
            result = builder.op(aten.to.dtype, result, wanted)
    return result


def _inline(builder: Builder, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Regions that only set a mode: gradients on or off, or autocast off."""
    name = getattr(node.target, "__name__", str(node.target))
    if name == "wrap_with_set_grad_enabled":
        enabled, region, inputs = args[0], args[1], args[2:]
    elif name == "wrap_with_autocast" and not args[2]:
        enabled, region, inputs = builder.grad_enabled, args[4], args[5:]
    else:
        what = "torch.autocast inside the model" if "autocast" in name else f"operator `{name}`"
        raise NotSupportedError(
            f"{what} cannot be captured",
            where=_region_source(node),
            hint="give the model its dtypes directly, or use the operators it is made of",
        )
    names = [n.name for n in region.graph.nodes if n.op == "placeholder"]
    outer, builder.grad_enabled = builder.grad_enabled, enabled
    outputs = normalise(region, builder, dict(zip(names, inputs, strict=True)))
    builder.grad_enabled, builder.origin = outer, node
    if enabled:
        return outputs
    traced = next(n for n in region.graph.nodes if n.op == "output").args[0]
    return tuple(
        builder.detach(value) if value in builder.has_grad and not _passes_through(leaf) else value
        for leaf, value in zip(traced, outputs, strict=True)
    )


def _passes_through(leaf: fx.Node) -> bool:
    """Is this result of a region its own input? A view made without gradient is not."""
    while (
        isinstance(leaf.target, torch._ops.OpOverload)
        and leaf.target.overloadpacket in RETURNS_INPUT
    ):
        leaf = leaf.args[0]  # type: ignore[assignment]
    return leaf.op == "placeholder"


def _region_source(node: fx.Node) -> str | None:
    for user in (node, *node.users):
        if source := source_line(user):
            return source
    return None
