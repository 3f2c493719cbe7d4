"""What each value depends on: constants only, inputs too, or anything.

    CONSTANT < INPUT < ANY; a value has the maximum over its operands        (`dependences`)

Parameters and random operators are `ANY`. Constants are folded. Divisors that depend on inputs
only move to the prologue. The main graph is what lies between these and the outputs (`cut`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import fx


class Depends(IntEnum):
    CONSTANT = 0
    INPUT = 1
    ANY = 2


def is_random(node: fx.Node) -> bool:
    """Does it draw random numbers?

    Such operators are never folded or removed, because the random stream must not shift.
    """
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        and not _draws_nothing(node)
    )


def _draws_nothing(node: fx.Node) -> bool:
    """Is its dropout probability 0? Attention is tagged random because of its dropout."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(value == 0.0)
    return False


def dependences(graph: fx.Graph, leaves: Mapping[fx.Node, Depends]) -> dict[fx.Node, Depends]:
    """What every node depends on, given the placeholders (`leaves`)."""
    found = dict(leaves)
    for node in graph.nodes:
        if node.op == "call_function":
            operands = (found[source] for source in node.all_input_nodes)
            found[node] = (
                Depends.ANY if is_random(node) else max(operands, default=Depends.CONSTANT)
            )
    return found


def merge_equal(graph: fx.Graph, depends: Mapping[fx.Node, Depends]) -> None:
    """Merge equal computations that do not depend on parameters.

    For example, every layer unsqueezes the same rotary table; merged, it is one constant. This
    is safe because the graph has no mutation: equal operators on equal operands give equal values.
    """
    first: dict[tuple[object, ...], fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and depends[node] < Depends.ANY:
            # Literals are compared by repr: 1, 1.0 and True are equal but give different dtypes.
            key = (node.target, repr(node.args), repr(sorted(node.kwargs.items())))
            known = first.setdefault(key, node)
            if known is not node:
                node.replace_all_uses_with(known)


@dataclass(frozen=True)
class Cut:
    """The nodes of the main graph (`live`), and the nodes that enter it from outside."""

    live: frozenset[fx.Node]
    constants: tuple[fx.Node, ...]
    divisors: tuple[fx.Node, ...]


def cut(
    graph: fx.Graph,
    outputs: Iterable[fx.Node],
    depends: Mapping[fx.Node, Depends],
    divisors: frozenset[fx.Node],
) -> Cut:
    """Walk back from the outputs and random operators; stop at constants and at `divisors`."""
    live: set[fx.Node] = set()
    entering: set[fx.Node] = set()
    stack = [*outputs, *(n for n in graph.nodes if is_random(n))]
    while stack:
        node = stack.pop()
        if depends[node] == Depends.CONSTANT or node in divisors:
            entering.add(node)
        elif node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    ordered = [n for n in graph.nodes if n in entering]
    return Cut(
        frozenset(live),
        tuple(n for n in ordered if n not in divisors),
        tuple(n for n in ordered if n in divisors),
    )


def subgraph(
    outputs: Sequence[fx.Node], stop: Iterable[fx.Node] = ()
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that returns `outputs` as a tuple, and the nodes that are its placeholders.

    Nodes in `stop` become placeholders too. Names are kept.
    """
    frontier = set(stop)
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in frontier:
                stack.extend(node.all_input_nodes)
    graph = fx.Graph()
    if not outputs:
        graph.output(())
        return graph, []
    ordered = [n for n in outputs[0].graph.nodes if n in needed]
    leaves = [n for n in ordered if n.op == "placeholder" or n in frontier]
    env: dict[fx.Node, fx.Node] = {}
    for node in leaves:
        env[node] = graph.create_node("placeholder", node.name, name=node.name)
        env[node].meta = dict(node.meta)
    for node in ordered:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in outputs))
    return graph, leaves
