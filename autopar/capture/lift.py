"""Lifts a normalised graph to float64, in place: every floating dtype, and every complex one.

A program in float64 shows whether its placements are right: nothing rounds but at 1e-16.
Placeholders get float64 values, dtype arguments are replaced, and fake values are computed anew. An
operator that would make float32 from integers gets the integers as float64. The results of
`where` between two numbers, whose operand must stay a mask, and of an `autograd.Function`, whose
own casts stay, are cast.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.capture.builder import COPIED_META, is_differentiable
from autopar.operators import function_of
from autopar.precision import lifted_dtype

aten = torch.ops.aten


def lift(
    graph: fx.Graph, mode: FakeTensorMode, has_grad: set[fx.Node], keeps_casts: bool = False
) -> Mapping[fx.Node, fx.Node]:
    """Lift `graph`; returns what stands for nodes that are gone or whose result was cast.

    keeps_casts    casts that change nothing any more stay, so that operators are those of the
                   graph before; else their input stands for them
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder":
            node.meta["val"] = _widened(mode, node.meta["val"])
            continue
        if node.target is operator.getitem:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
        else:
            node.args, node.kwargs = pytree.tree_map(
                lambda v: lifted_dtype(v) if isinstance(v, torch.dtype) else v,
                (node.args, node.kwargs),
            )
            if not keeps_casts and _changes_nothing(node):
                replaced[node] = node.args[0]
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
            node.meta["val"] = _run(node, mode)
            if _is_low(node.meta["val"]) and not _is_cast_after(node):
                _widen_integers(graph, node, mode)
        is_tensor = isinstance(node.meta["val"], torch.Tensor)
        if is_tensor and _is_cast_after(node) and _is_low(node.meta["val"]):
            replaced[node] = _cast_after(graph, node, mode, has_grad)
    return replaced


def _widened(mode: FakeTensorMode, value: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(
            tuple(value.shape), value.stride(), dtype=lifted_dtype(value.dtype), device=value.device
        )


def _changes_nothing(node: fx.Node) -> bool:
    return bool(node.target is aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1])  # type: ignore[union-attr]


def _run(node: fx.Node, mode: FakeTensorMode) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _widen_integers(graph: fx.Graph, node: fx.Node, mode: FakeTensorMode) -> None:
    """Cast integer operands to float64; else their quotient or square root is float32."""
    for source in node.all_input_nodes:
        if is_differentiable(source.meta["val"]):
            continue
        with graph.inserting_before(node):
            cast = _cast(graph, source, node, mode)
        node.replace_input_with(source, cast)
    node.meta["val"] = _run(node, mode)


def _cast_after(
    graph: fx.Graph, node: fx.Node, mode: FakeTensorMode, has_grad: set[fx.Node]
) -> fx.Node:
    users = list(node.users)
    with graph.inserting_after(node):
        cast = _cast(graph, node, node, mode)
    for user in users:
        user.replace_input_with(node, cast)
    if node in has_grad:
        has_grad.add(cast)
    return cast


def _cast(graph: fx.Graph, source: fx.Node, origin: fx.Node, mode: FakeTensorMode) -> fx.Node:
    cast = graph.create_node("call_function", aten.to.dtype, (source, torch.float64), name="to")
    cast.meta = {key: origin.meta[key] for key in COPIED_META if key in origin.meta}
    cast.meta["val"] = _run(cast, mode)
    return cast


def _is_cast_after(node: fx.Node) -> bool:
    """Is it a `where` between two numbers, or a result of a user's `autograd.Function`?"""
    if node.target is aten.where.Scalar:
        return True
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return function_of(str(source.target)) is not None


def _is_low(value: Any) -> bool:
    return any(
        isinstance(v, torch.Tensor) and v.dtype != lifted_dtype(v.dtype)
        for v in pytree.tree_leaves(value)
    )
