"""Rules derived from torch's tags, for operators that no table lists.

Torch tags an operator as pointwise (`torch.Tag.pointwise`) if each element of a result depends only
on the same element of the inputs, broadcast. Every dim of such an operator may be sharded; whether
it is linear is unknown. So the tables list a pointwise operator only to say more than that.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.rules.families import pointwise
from autopar.rules.operators import lookup
from autopar.rules.rule import OpRule


@lru_cache(maxsize=1024)
def derived_rule(op: str) -> OpRule | None:
    """The rule of a pure pointwise operator; None for any other."""
    operator = lookup(op)
    if operator is None or torch.Tag.pointwise not in operator.tags or not is_pure(operator):
        return None
    # Python scalars have overloads too: `eq.int` gives a bool.
    of_tensors = all(str(result.type) == "Tensor" for result in operator._schema.returns)
    return OpRule(op, pointwise) if of_tensors else None


def is_pure(operator: torch._ops.OpOverload) -> bool:
    """Does the operator write to no argument and draw no random numbers?"""
    random = torch.Tag.nondeterministic_seeded in operator.tags
    return not operator._schema.is_mutable and not random
