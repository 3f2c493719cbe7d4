"""Mixtures of experts: two matmuls by the same ids, and an activation between them, as one operator.

    h = expert_linear(x, w_in, ids)
    a = act(h), or act(gate) * up with gate and up the halves of h
    y = expert_linear(a, w_out, ids)                        becomes expert_mlp(x, w_in, w_out, ids)

for the activations of `operators/experts.py`. Sharded experts then exchange rows once a mixture, not
once a matmul. If anything else reads what is in between, or the activation is another one, such as
gpt-oss's with its biases, they stay two matmuls.
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
        for first, activation, between in _candidates(node):
            x, w_in, *how = _arguments(first)
            features, w_out, *same = _arguments(node)
            inside = {first, *between}
            joined = how == same and all(
                user in (inside | {node}) for each in inside for user in each.users
            )  # fmt: skip
            if joined and len({each.meta.get(REGION) for each in (*inside, node)}) == 1:
                ids, transposed = how
                node.target, node.kwargs = EXPERT_MLP, {}
                node.args = (x, w_in, w_out, ids, activation, transposed)
                node._rename("expert_mlp")
                for each in reversed([n for n in graph.nodes if n in inside]):
                    graph.erase_node(each)
                break


def _candidates(second: fx.Node) -> Iterator[tuple[fx.Node, str, list[fx.Node]]]:
    """(first matmul, activation, nodes between) if a second matmul is of a mixture."""
    features = second.args[0]
    assert isinstance(features, fx.Node)
    pairs: list[tuple[Any, Any]] = [(features, None)]
    if features.target == aten.mul.Tensor:
        pairs = [features.args[:2], features.args[1::-1]]
    for activated, up in pairs:
        activation = _activation(activated)
        if activation is None:
            continue
        before = activated.args[0]
        if up is None:
            if before.target == EXPERT_LINEAR:
                yield before, activation, [activated]
            continue
        gate, other = _half(before), _half(up)
        if gate and other and gate[:2] == (other[0], 0) and other[1] == 1:
            inner = {features, activated, before, up, *gate[2], *other[2]}
            yield gate[0], activation, list(inner)


def _activation(node: Any) -> str | None:
    if not isinstance(node, fx.Node) or node.target not in _ACTIVATIONS:
        return None
    name = _ACTIVATIONS[node.target]
    if name == "gelu":
        how = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        return "gelu" if how == "none" else "gelu_tanh"
    return name


def _half(node: Any) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """The matmul that `node` is a half of the features of, which half, and nodes in between."""
    if not isinstance(node, fx.Node):
        return None
    n = node.meta["val"].shape[-1]
    if node.target is operator.getitem:
        (parts, which), between = node.args, []
        source = parts.args[0] if parts.target in _HALVES else None  # type: ignore[union-attr]
        between = [parts]
    elif node.target == aten.slice.Tensor:
        source, dim, start, _, *step = node.args
        which, rest = divmod(int(start), n)  # type: ignore[arg-type]
        if dim not in (1, -1) or rest or step not in ([], [1]):
            return None
        between = []
    else:
        return None
    if not isinstance(source, fx.Node) or source.target != EXPERT_LINEAR:
        return None
    shape = source.meta["val"].shape
    if node.meta["val"].shape != (shape[0], shape[1] // 2) or 2 * n != shape[1]:
        return None
    return source, which, between


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Rows, weight, ids, and whether the weight is transposed."""
    return *node.args[:3], bool(node.args[3]) if len(node.args) > 3 else False
