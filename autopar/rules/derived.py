"""Rules of operators that no table lists, from what torch says of them.

Torch tags operators whose every result depends on the same element of their inputs alone,
broadcast (`torch.Tag.pointwise`): each dim may be sharded, and nothing is known to be linear.
So the table lists a pointwise operator only for what it knows besides.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from autopar.rules.families import pointwise
from autopar.rules.operators import lookup
from autopar.rules.rule import OpRule


@lru_cache(maxsize=1024)
def derived_rule(op: str) -> OpRule | None:
    """The rule of a pointwise operator; None for one that is not, or draws random numbers."""
    operator = lookup(op)
    if operator is None or torch.Tag.pointwise not in operator.tags or not is_pure(operator):
        return None
    # Python scalars have overloads too: `eq.int` gives a bool.
    of_tensors = all(str(result.type) == "Tensor" for result in operator._schema.returns)
    return OpRule(op, pointwise) if of_tensors else None


def is_pure(operator: torch._ops.OpOverload) -> bool:
    """Writes to no argument and draws no random numbers."""
    random = torch.Tag.nondeterministic_seeded in operator.tags
    return not operator._schema.is_mutable and not random
