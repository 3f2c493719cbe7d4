"""Operators without a rule: refuse them, or keep them whole if the user accepts the cost.

    fallback="error"       raises `MissingRuleError`, with the line to write
    fallback="replicate"   every rank runs the whole operator on whole tensors: correct, and as
                           slow as on one device. It warns once per operator

Only operators that write to nothing and draw no random numbers can be kept whole. The batch
cannot pass through such an operator, so there is one microbatch.

A `torch.autograd.Function` without a rule is kept whole in either case, with the same warning: its
author did not choose an operator that has no rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal

from autopar.operators import NAMESPACE, function_of
from autopar.program.graph import Program
from autopar.rules import (
    OpCall,
    has_rule,
    is_function,
    keep_whole,
    missing_rule,
    register_line,
)

Fallback = Literal["error", "replicate"]


def accept_missing(program: Program, fallback: Fallback) -> tuple[str, ...]:
    """The operators that are kept whole.

    Raises `MissingRuleError` for an operator without a rule that may not be kept whole.
    """
    places: dict[str, list[str]] = {}
    calls: dict[str, OpCall] = {}
    for node in program.operators:
        if not has_rule(str(node.target)):
            places.setdefault(str(node.target), []).append(program.where(node.name))
            calls.setdefault(str(node.target), OpCall.of_node(node))
    for op, where in places.items():
        if fallback == "error" and not is_function(op):
            raise missing_rule(op, where[0], calls[op])
        keep_whole(op, where[0])
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        warnings.warn(
            f"{_described(op)} has no sharding rule and is kept whole: every rank gathers its "
            "inputs and spends the full time on it, and the batch is not split into microbatches\n"
            f"  at {where[0]}{more}\n"
            f"  hint: {register_line(op, calls[op])}, without the ! of names that may be sharded",
            stacklevel=2,
        )
    return tuple(places)


def keep_whole_as_planned(kept_whole: Iterable[str]) -> None:
    """Keep the same operators whole as the plan does; every process that runs it calls this."""
    for op in kept_whole:
        if not op.startswith(NAMESPACE):  # a function without a rule is whole anyway
            keep_whole(op)


def _described(op: str) -> str:
    function = function_of(op)
    if function is None:
        return f"operator {op}"
    return f"autograd.Function {function.cls.__qualname__}"
