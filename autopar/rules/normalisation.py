"""Batch norm in training, as capture writes it: the new running statistics are results.

    n c s!, c, c, c, c -> n c s!, c, c, c, c    the normalised input; the batch's mean and
                                                1 / deviation; the running mean and variance

Statistics are over all dims but the channels. Channels may be sharded, and the batch by a lowering.
"""

from __future__ import annotations

from autopar.placement import Notation
from autopar.rules.convolutions import batch_norm
from autopar.rules.families import named_term
from autopar.rules.lowering import BATCH_NORM_WITH_STATISTICS
from autopar.rules.rule import OpCall, OpRule


def batch_norm_with_statistics(call: OpCall) -> Notation:
    plain = batch_norm(call)
    statistics = tuple(named_term(shape, ("c",)) for shape in call.outputs[1:])
    return Notation(plain.inputs, (*plain.outputs, *statistics), plain.frozen)


NORMALISATION = (
    OpRule(
        "aten._native_batch_norm_legit_functional.default",
        batch_norm_with_statistics,
        lower={"n": BATCH_NORM_WITH_STATISTICS},
    ),
)
