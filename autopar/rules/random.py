"""Rules of the random operators (`operators/random.py`).

The bits of an element depend on its global index. The operators get it as one vector of positions
per dim. So every dim may be sharded, together with its vector, and no argument is localised.
"""

from __future__ import annotations

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


RANDOM = (
    OpRule("autopar.dropout.default", dropout, linear=((0,),)),
    OpRule("autopar.uniform.default", uniform),
)
