"""The prologue: divisors that depend on inputs only, computed once per step.

    mean loss = sum(losses of my rows) / count(labels of the whole batch)

The count is a sum over the rows of the global batch, so it moves out of the main graph. What is
left is a plain sum over rows, which splits exactly over ranks and microbatches. Two kinds of
divisors move (`find_divisors`): counts made by the canonical losses, and a 0-d sum that the model
itself divides by (such as that of a mask).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

from autopar.capture.dependence import Depends, subgraph
from autopar.program.graph import Prologue

aten = torch.ops.aten


def find_divisors(
    graph: fx.Graph, counts: set[fx.Node], depends: Mapping[fx.Node, Depends], leaves: set[fx.Node]
) -> frozenset[fx.Node]:
    """The nodes that move to the prologue.

    counts    counts of labels in mean losses
    leaves    buffers and literals, which the prologue cannot read

    Raises `NotSupportedError` if a count depends on parameters or random numbers.
    """
    found = set()
    for node in graph.nodes:
        if depends.get(node) != Depends.INPUT or _reads(node, leaves):
            continue
        if node in counts or (_divides(node) and _is_sum(node)):
            found.add(node)
    return frozenset(found)


def _reads(node: fx.Node, leaves: set[fx.Node]) -> bool:
    return any(leaf in leaves for leaf in subgraph([node])[1])


def _divides(node: fx.Node) -> bool:
    return any(
        user.target == aten.div.Tensor and user.args[1] is node and user.args[0] is not node
        for user in node.users
    )


def _is_sum(node: fx.Node) -> bool:
    """Is it a 0-d sum over all elements, possibly cast? Such a sum adds up over rows."""
    while node.target == aten.to.dtype:
        node = node.args[0]  # type: ignore[assignment]
    return node.target == aten.sum.default


def make_prologue(divisors: tuple[fx.Node, ...]) -> Prologue | None:
    """A graph of the divisors, with the names of the main graph; None if there are none."""
    if not divisors:
        return None
    graph, _ = subgraph(divisors)
    return Prologue(fx.GraphModule(nn.Module(), graph), tuple(node.name for node in divisors))
