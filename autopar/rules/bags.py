"""Rules of bags of an embedding's rows (`operators/bags.py`).

    v h, b l -> b h                  ids in rows; sharding `v` or `l` leaves the sum Partial
    v h, n!, b, b -> b h             ids in a list, with starts and ends of bags
    v h, b l, b l -> b h             with factors; v is called w: its lowering keeps the table
    v! h, b l! -> b h, b h           maxima

Every rank has the ids of all its bags. With the table's rows sharded, ids of other ranks count 0.
"""

from __future__ import annotations

from autopar import operators
from autopar.placement import Notation
from autopar.rules.families import named_term
from autopar.rules.lowering import VOCABULARY_BAGS, VOCABULARY_WEIGHTED_BAGS
from autopar.rules.rule import LinearSets, OpCall, OpRule


def _bags(call: OpCall) -> Notation:
    is_max, has_factors = len(call.outputs) == 2, call.args.get("factors") is not None
    is_listed = call.args["starts"] is not None
    rows = "w" if has_factors else "v"
    ids = ("n",) if is_listed else ("b", "l")
    terms = [(rows, "h"), ids, *([("b",), ("b",)] if is_listed else [])]
    terms += [ids] if has_factors else []
    return Notation(
        tuple(named_term(s, t) for s, t in zip(call.inputs, terms, strict=True)),
        tuple(named_term(shape, ("b", "h")) for shape in call.outputs),
        frozenset({"n", *((rows, "l") if is_max else ())}),
    )


def _table_or_factors(call: OpCall) -> LinearSets:
    last = len(call.inputs) - 1
    return ((0,), (last,)) if call.args["factors"] is not None else ((0,),)


BAGS = (
    OpRule(
        str(operators.bags.embedding_bag._opoverload),
        _bags,
        linear=_table_or_factors,
        lower={"v": VOCABULARY_BAGS, "w": VOCABULARY_WEIGHTED_BAGS},
    ),
    OpRule(str(operators.bags.embedding_bag_max._opoverload), _bags),
)
