"""Placement: where the values of a tensor live on a mesh, and how that changes.

Read `spec.py` (placements and specs), `moves.py` (one-axis changes, with their backward),
`head_tail.py` (shards of a causal sequence), `notation.py` (which dims of an operator's tensors are
the same), `pins.py` (what `force` demands), `shards.py` (the definition of a placement, on real
tensors).
It imports only rooms below it; it uses `errors`, and torch only in `shards.py`.
It mainly hands on `Spec`, `Move` and `Notation`.
"""

from autopar.placement.head_tail import folds_of, head_tail_order, intervals_of
from autopar.placement.moves import COLLECTIVES, COMMUNICATION, TABLE, Move, PrimitiveKind, Split
from autopar.placement.notation import ELLIPSIS, Dim, Notation, Term
from autopar.placement.pins import Pin, parse_pins
from autopar.placement.shards import difference, gather, gradient_spec, scatter
from autopar.placement.spec import (
    PREFERENCE,
    I,
    P,
    Placement,
    R,
    S,
    Spec,
    TensorType,
    all_specs,
    canonical_spec,
    divides,
    every_order,
    illegal_reason,
    local_bytes,
    local_dims,
    local_shape,
    without_gradient,
)

__all__ = [
    "COLLECTIVES",
    "COMMUNICATION",
    "ELLIPSIS",
    "PREFERENCE",
    "TABLE",
    "Dim",
    "I",
    "Move",
    "Notation",
    "P",
    "Pin",
    "Placement",
    "PrimitiveKind",
    "R",
    "S",
    "Spec",
    "Split",
    "TensorType",
    "Term",
    "all_specs",
    "canonical_spec",
    "difference",
    "divides",
    "every_order",
    "folds_of",
    "gather",
    "gradient_spec",
    "head_tail_order",
    "illegal_reason",
    "intervals_of",
    "local_bytes",
    "local_dims",
    "local_shape",
    "parse_pins",
    "scatter",
    "without_gradient",
]
