"""Inlines regions that switch autocast off.

In the trace, they become graphs of their own. Here their operators move into the main graph. So one
pass sees all uses and writes of a value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture.names import source_line
from autopar.errors import NotSupportedError


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """The graph of `module` without regions.

    Raises `NotSupportedError` for higher-order operators that do more than set a mode.
    """
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        env[node] = graph.create_node("placeholder", str(node.target), name=node.name)
        env[node].name = node.name  # fx renames Python builtins such as `input`
        env[node].meta = dict(node.meta)
    graph.output(_copy(module, graph, env))
    graph.lint()
    return graph


def _copy(module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any]) -> Any:
    """Copy the operators of `module` into `graph`; returns what its output node returns."""
    for node in module.graph.nodes:
        if node.op == "output":
            return substitute(node.args[0], env)
        if node.op == "get_attr":
            env[node] = getattr(module, str(node.target))
        elif node.op == "call_function":
            env[node] = _copied(graph, node, env)
    raise AssertionError("a graph without output")


def _copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    args = substitute(node.args, env)
    if node.target is operator.getitem and not isinstance(args[0], fx.Node):
        return args[0][args[1]]  # a result of a region
    if node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload):
        return graph.node_copy(node, lambda n: env[n])
    name = getattr(node.target, "__name__", str(node.target))
    if name == "wrap_with_autocast" and not args[2]:
        region, inputs = args[4], args[5:]
    else:
        what = "torch.autocast inside the model" if "autocast" in name else f"operator `{name}`"
        raise NotSupportedError(
            f"{what} cannot be captured",
            where=_source(node),
            hint="give the model its dtypes directly, or use the operators it is made of",
        )
    inner = dict(zip(region.graph.find_nodes(op="placeholder"), inputs, strict=True))
    return _copy(region, graph, inner)


def substitute(value: Any, env: Mapping[fx.Node, Any]) -> Any:
    """Like `fx.node.map_arg`, but a node may be replaced by a tuple or a module."""
    if isinstance(value, fx.Node):
        return env[value]
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(v, env) for v in value)
    if isinstance(value, dict):
        return {k: substitute(v, env) for k, v in value.items()}
    return value


def _source(node: fx.Node) -> str | None:
    for user in (node, *node.users):
        if source := source_line(user):
            return source
    return None
