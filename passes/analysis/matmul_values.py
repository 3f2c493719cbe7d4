"""Which activations a matmul makes or reads, perhaps through views.

Software that divides such a matmul into chunks runs the collectives of a reshard of theirs under
it, both ways (`overlapped_tp` of `cost/hardware/software.py`).
"""

from __future__ import annotations

from autopar.caching import once
from autopar.program.communication import MATMULS
from autopar.program.graph import Program
from autopar.rules import VIEWS

_VIEWS = frozenset(rule.op for rule in VIEWS if rule.view)


@once
def values_at_matmuls(program: Program) -> frozenset[str]:
    """The names of these activations."""
    made, read = set[str](), set[str]()
    nodes = [(node, str(node.target)) for node in program.graph.nodes]
    for node, target in nodes:
        is_made = target in _VIEWS and any(n.name in made for n in node.all_input_nodes)
        if is_made or target in MATMULS:
            made.add(node.name)
    for node, target in reversed(nodes):
        if target in MATMULS or (target in _VIEWS and node.name in read):
            read.update(n.name for n in node.all_input_nodes)
    return frozenset(made | read) - program.parameters.keys()
