"""Mixtures of experts: two matmuls by equal ids, with an activation between them, as one operator.

    h = expert_linear(x, w_in, ids)
    a = act(h), or act(gate) * up with gate and up the halves of h
    y = expert_linear(a, w_out, ids)                        becomes expert_mlp(x, w_in, w_out, ids)

for the activations of `operators/experts.py`. Sharded experts then exchange rows once a mixture,
not once a matmul. If anything else reads what is in between, or the activation is another one, such
as gpt-oss's with its biases, they stay two matmuls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar.capture.trace import REGION
from autopar.operators.experts import EXPERT_LINEAR, EXPERT_MLP

aten = torch.ops.aten
_ACTIVATIONS = {aten.silu.default: "silu", aten.gelu.default: "gelu", aten.relu.default: "relu"}
_HALVES = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)


def join_mixtures(graph: fx.Graph) -> None:
    """Make one operator of every mixture, in place; `graph` has no dead nodes.

    The node of the second matmul becomes that of the mixture.
    """
    for node in [n for n in graph.nodes if n.target == EXPERT_LINEAR]:
        _, w_out, other_ids, transposed = _matmul(node)
        for first, activation, between in _candidates(node):
            x, w_in, ids, first_transposed = _matmul(first)
            inside = {first, *between}
            if (
                transposed == first_transposed
                and _is_same(ids, other_ids)
                and all(user in inside or user is node for n in inside for user in n.users)
                and len({n.meta.get(REGION) for n in (*inside, node)}) == 1
            ):
                node.target, node.args = EXPERT_MLP, (x, w_in, w_out, ids, activation, transposed)
                node._rename("expert_mlp")
                for n in [n for n in reversed(graph.nodes) if n in inside]:
                    graph.erase_node(n)
                if other_ids is not ids and not other_ids.users:
                    graph.erase_node(other_ids)
                break


def _candidates(second: fx.Node) -> Iterator[tuple[fx.Node, str, list[fx.Node]]]:
    """(first matmul, activation, nodes between) if a second matmul may be of a mixture."""
    features = _args(second)[0]
    pairs: list[tuple[Any, Any]] = [(features, None)]
    if features.target == aten.mul.Tensor:
        left, right = _args(features)
        pairs = [(left, right), (right, left)]
    for activated, up in pairs:
        activation = _activation(activated)
        if activation is None:
            continue
        before = _args(activated)[0]
        if up is None:
            if before.target == EXPERT_LINEAR:
                yield before, activation, [activated]
            continue
        gate, other = _half(before), _half(up)
        if (
            gate is not None
            and other is not None
            and (gate[0], 0, 1) == (other[0], gate[1], other[1])
        ):
            between = {features, activated, before, up, *gate[2], *other[2]}
            yield gate[0], activation, [*between]


def _activation(node: Any) -> str | None:
    if not isinstance(node, fx.Node) or node.target not in _ACTIVATIONS:
        return None
    name = _ACTIVATIONS[node.target]
    if name != "gelu":
        return name
    how = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
    return "gelu" if how == "none" else "gelu_tanh"


def _half(node: Any) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """The matmul that `node` is a half of the features of, which half, and the nodes in between."""
    if not isinstance(node, fx.Node):
        return None
    (source, *rest), between, n = _args(node), [], node.meta["val"].shape[-1]
    if node.target is operator.getitem:
        between, which = [source], rest[0]
        if source.target not in _HALVES:
            return None
        source = _args(source)[0]
    elif node.target == aten.slice.Tensor and rest[0] in (1, -1):
        which, start = divmod(rest[1], n)
        if start:
            return None
    else:
        return None
    if source.target != EXPERT_LINEAR:
        return None
    # Equal heights and half the width: of the two parts of it, or every second of its columns.
    is_half = node.meta["val"].shape == (len(source.meta["val"]), source.meta["val"].shape[1] / 2)
    is_dense = node.target is operator.getitem or rest[3:] in ([], [1])
    return (source, which, between) if is_half and is_dense else None


def _is_same(ids: fx.Node, others: fx.Node) -> bool:
    """Are they the same ids? They may be reshaped twice."""
    if ids is others:
        return True
    if not ids.target == others.target == aten.reshape.default:
        return False
    (source, shape), (other, other_shape) = _args(ids), _args(others)
    return shape == other_shape and _is_same(source, other)


def _matmul(node: fx.Node) -> tuple[Any, ...]:
    """Rows, weight, ids, and whether the weight is transposed."""
    rows, weight, ids, *transposed = _args(node)
    return rows, weight, ids, any(transposed)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args
