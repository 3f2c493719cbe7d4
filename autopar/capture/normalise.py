"""Brings the operators of the traced graph into canonical form, in one walk (`normalise`).

Each operator goes through the table of `rewrites/`. A composite operator without a rewrite is
replaced by its parts (`rewrites/decompose.py`), which are normalised in turn. Assertions are
dropped. If an operator reads a value with gradients off, the value is detached first, so
`has_grad` agrees with eager autograd.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.autocast import Autocast
from autopar.capture.builder import Builder, TracedCall
from autopar.capture.names import source_line
from autopar.capture.rewrites import decomposition, rewrite_of
from autopar.capture.trace import GRAD_ENABLED, substitute
from autopar.capture.view_writes import WRITTEN
from autopar.errors import NotSupportedError
from autopar.operators import function_of
from autopar.rules import OpCall, has_rule, register_line

aten = torch.ops.aten
ASSERTIONS = frozenset(
    {
        aten._assert_tensor_metadata,
        aten._assert_scalar,
        aten._assert_async,
        aten._linalg_check_errors,
        aten.sym_constrain_range,
        aten.sym_constrain_range_for_size,
    }
)
# These return the input itself, not a view of it, if there is nothing to do.
RETURNS_INPUT = frozenset({aten.to, aten.type_as, aten.dropout, aten.contiguous})


def normalise(
    graph: fx.Graph, builder: Builder, placeholders: Mapping[str, Any], autocast: Autocast
) -> tuple[Any, ...]:
    """Emit `graph` into `builder`; returns its output leaves as nodes of the new graph.

    placeholders    name of a traced placeholder -> its new node or baked-in value
    autocast        what casts the operands of operators
    """
    env: dict[fx.Node, Any] = {}
    grad_enabled = builder.grad_enabled
    for node in graph.nodes:
        builder.origin = node
        if node.op == "placeholder":
            env[node] = placeholders[node.name]
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], lambda n: env[n]))
        else:
            builder.grad_enabled = node.meta.get(GRAD_ENABLED, grad_enabled)
            if WRITTEN in node.meta:
                _check_write(builder, node, env[node.meta[WRITTEN]])
            args, kwargs = substitute((node.args, node.kwargs), env)
            env[node] = _emit(builder, node, args, kwargs, autocast)
            builder.grad_enabled = grad_enabled
    raise AssertionError("a graph without output")


def _check_write(builder: Builder, node: fx.Node, before: Any) -> None:
    """`node` is the new content of memory that held `before`."""
    if not builder.grad_enabled and before in builder.has_grad:
        raise NotSupportedError(
            "an in-place operator changes, without gradients, a value that carries gradient",
            where=source_line(node),
            hint="use the out-of-place form, on x.detach() where no gradient is wanted",
        )


def _emit(
    builder: Builder, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any],
    autocast: Autocast,
) -> Any:  # fmt: skip
    if node.target is operator.getitem:
        return builder.getitem(args[0], args[1])
    assert isinstance(node.target, torch._ops.OpOverload), node.target
    packet = node.target.overloadpacket
    if packet in ASSERTIONS:
        return None
    in_place = WRITTEN in node.meta
    _note_function(builder, node)
    args, kwargs = autocast.operands(builder, node.target, args, kwargs)
    call = TracedCall(node.target, args, dict(kwargs), node)
    rewrite = rewrite_of(node.target)
    result = rewrite(builder, call) if rewrite is not None else None
    if result is None:
        result = _decomposed(builder, call, autocast)
    if result is None:
        result = builder.emit(node.target, args, dict(kwargs), None if in_place else node)
    if in_place:  # an in-place result keeps the dtype of what it overwrites
        assert isinstance(result, fx.Node)
        result = builder.cast(result, node.meta["val"].dtype)
    if not builder.grad_enabled and packet not in RETURNS_INPUT:
        return fx.node.map_aggregate(result, lambda value: _drop_gradient(builder, value))
    return result


def _note_function(builder: Builder, node: fx.Node) -> None:
    """Put an `autograd.Function` into the audit, with what it costs."""
    function = function_of(str(node.target))
    if function is None:
        return
    name, why = function.cls.__qualname__, "runs with its own backward"
    if not has_rule(str(node.target)):
        why += (
            ", whole on every rank and without microbatches, for want of a rule: "
            f"{register_line(str(node.target), OpCall.of_node(node))}, without the ! of names that "
            "may be sharded"
        )
    builder.findings.add("kept", f"autograd.Function {name}", why, source_line(node))


def _decomposed(builder: Builder, call: TracedCall, autocast: Autocast) -> Any:
    """Emit the parts of a composite operator; returns its results, or None to keep it whole."""
    with autocast.precision.autocast():
        parts = decomposition(builder, call)
    if parts is None:
        return None
    graph, sources = parts
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    outer = builder.grad_enabled
    results = normalise(graph, builder, dict(zip(names, sources, strict=True)), autocast)
    builder.origin, builder.grad_enabled = call.origin, outer
    return results if isinstance(call.origin.meta["val"], (list, tuple)) else results[0]


def _drop_gradient(builder: Builder, value: Any) -> Any:
    """`value` detached if it carries gradient.

    A rewrite may return its input, but a view or copy made with gradients off carries none.
    """
    return builder.detach(value) if value in builder.has_grad else value
