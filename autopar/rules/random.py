"""Rules of the random operators (`autopar/operators/random.py`).

Each element's bits follow from its global index, which the operators get as one vector of
positions per dim. So every dim may be sharded, its vector with it, and nothing is localised.
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
    """`d0 d1 ..., , d0, d1, ... -> d0 d1 ...`: the tensor, the seed, positions."""
    shape, _, *vectors = call.inputs
    labels = f.names(len(shape))
    term = f.named_term(shape, labels)
    return Notation((term, (), *_positions(labels, tuple(vectors))), (term,))


def uniform(call: OpCall) -> Notation:
    """`, d0, d1, ... -> d0 d1 ...`: the seed and positions."""
    shape = call.outputs[0]
    labels = f.names(len(shape))
    return Notation(((), *_positions(labels, call.inputs[1:])), (f.named_term(shape, labels),))


RANDOM = (
    OpRule("autopar.dropout.default", dropout, linear=((0,),)),
    OpRule("autopar.uniform.default", uniform),
)
