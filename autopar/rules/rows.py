"""Does an operator compute each row of its tensors alone?

It does if its rule lets the rows be sharded: a rank with some of them would compute just those.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.errors import NotationError
from autopar.placement import Term
from autopar.rules.registry import has_rule, rule_for
from autopar.rules.rule import OpCall


def row_dim(node: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """The dim of rows in all results of `node`; None if it does not compute each row alone.

    dims    operand -> its dim of rows; the others have no rows
    """
    if not dims or not has_rule(str(node.target)):
        return None
    call = OpCall.of_node(node)
    try:
        notation = rule_for(str(node.target)).notation_of(call)
    except NotationError:  # no call that the rule knows
        return None
    terms, tensors = notation.inputs, call.tensors
    names = {terms[i][dims[n]] for i, n in enumerate(tensors) if n in dims}
    if len(names) != 1 or len(name := names.pop()) != 1 or name[0] in notation.frozen:
        return None

    def places(term: Term) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(term) if name[0] in dim)

    wanted = [(dims[n],) if n in dims else () for n in tensors]
    made = {places(term) for term in notation.outputs}
    if [*map(places, terms)] != wanted or len(made) != 1 or len(found := made.pop()) != 1:
        return None
    return found[0] if all(term[found[0]] == name for term in notation.outputs) else None
