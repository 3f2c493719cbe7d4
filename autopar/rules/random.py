"""Rules of random operators and of attention in blocks (`operators/`: `random.py`, `attention.py`,
`ranges.py`).

The bits of an element depend on its global index. The operators get it as one vector of positions
per dim. So every dim may be sharded, together with its vector, and no argument is localised.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.placement import Notation, Term
from autopar.rules import families as f
from autopar.rules.rule import OpCall, OpRule, Shape


def _positions(labels: tuple[str, ...], vectors: tuple[Shape, ...]) -> tuple[Term, ...]:
    return tuple(
        f.named_term(shape, (label,)) for label, shape in zip(labels, vectors, strict=True)
    )


def dropout(call: OpCall) -> Notation:
    """`d0 d1 ..., , d0, d1, ... -> d0 d1 ...`: the tensor, the seed, the positions."""
    shape, _, *vectors = call.inputs
    labels = f.names(len(shape))
    term = f.named_term(shape, labels)
    return Notation((term, (), *_positions(labels, tuple(vectors))), (term,))


def uniform(call: OpCall) -> Notation:
    """`, d0, d1, ... -> d0 d1 ...`: the seed and the positions."""
    shape = call.outputs[0]
    labels = f.names(len(shape))
    return Notation(((), *_positions(labels, call.inputs[1:])), (f.named_term(shape, labels),))


def attention(call: OpCall) -> Notation:
    """The notation of attention, with the seed and the positions of the weights [*, s, t].

    Rows of a causal query know their positions, so they are named `s` and need no lowering.
    """
    n_dims = len(call.args["positions"])
    plain = replace(call, args={**call.args, "is_causal": False}, inputs=call.inputs[: -1 - n_dims])
    notation = f.attention(plain)
    (out,) = notation.outputs
    keys = notation.inputs[1][-2]
    positions = tuple((dim,) for dim in (*out[:-1], keys))
    held = notation.frozen | {"t"}
    return Notation((*notation.inputs, (), *positions), notation.outputs, held)


def count_below(call: OpCall) -> Notation:
    """`* 1 t, * s 1 -> * s 1`: every row needs all columns."""
    columns, rows = call.inputs
    (out,) = call.outputs
    labels = f.names(len(out) - 2, "_")
    of_columns, of_rows, of_out = (
        f.broadcast_term(shape[:-2], out[:-2], labels) for shape in (columns, rows, out)
    )
    by_row = f.named_term(rows[-2:-1], ("s",))
    return Notation(
        ((*of_columns, (), ("t",)), (*of_rows, *by_row, ())), ((*of_out, *by_row, ()),),
        frozenset({"t"}),
    )  # fmt: skip


RANDOM = (
    OpRule("autopar.dropout.default", dropout, linear=((0,),)),
    OpRule("autopar.uniform.default", uniform),
    OpRule("autopar.attention_dropout.default", attention, "4*s*t*e*g", fused=True),
    # Ranges are [*, s, 1]: masks that broadcast over keys. Scores in float32 are written by a
    # matmul, masked in place (8), read and written by softmax (8), cast (6) and read by a matmul.
    OpRule(
        "autopar.attention_ranges.default", f.attention, "4*s*t*e*g", fused=True, score_bytes=28
    ),
    OpRule("autopar.count_below.default", count_below),
)
