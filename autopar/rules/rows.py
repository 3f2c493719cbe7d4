"""Does an operator compute each row of its tensors alone?

It does if its rule lets the rows be sharded: a rank with some of them would compute just those.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.rules.registry import has_rule, rule_for
from autopar.rules.rule import OpCall


def row_dim(node: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """The dim of rows in all results of `node`; None if it does not compute each row alone.

    dims    operand -> its dim of rows; the others have no rows
    """
    if not dims or not has_rule(str(node.target)):
        return None
    call = OpCall.of_node(node)
    notation = rule_for(str(node.target)).notation_of(call)
    names = {notation.inputs[i][dims[n]] for i, n in enumerate(call.tensors) if n in dims}
    if len(names) != 1 or len(name := names.pop()) != 1 or name[0] in notation.frozen:
        return None
    for term, operand in zip(notation.inputs, call.tensors, strict=True):
        if [i for i, dim in enumerate(term) if name[0] in dim] != [
            dims[n] for n in (operand,) if n in dims
        ]:
            return None
    found = {tuple(i for i, dim in enumerate(term) if name[0] in dim) for term in notation.outputs}
    if len(found) != 1 or len(places := found.pop()) != 1:
        return None
    (place,) = places
    return place if all(term[place] == name for term in notation.outputs) else None
