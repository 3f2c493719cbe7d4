"""Rules of `torch.autograd.Function` classes: one rule for all operators made of a class.

A function's backward may be anything, such as a clipped gradient. So it is never given a Partial
gradient, only the gradient itself or a shard of it (`OpRule.whole_gradients`).

A few functions of libraries have a rule here, by the full name of their class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar.operators import full_name, function_of, is_same_function
from autopar.placement import Notation
from autopar.rules.families import pointwise
from autopar.rules.rule import Family, OpRule
from autopar.rules.signature import check_flops, check_notation

Function = type[torch.autograd.Function]

_OF_LIBRARIES: dict[str, Family] = {
    "transformers.models.bloom.modeling_bloom.GeLUFunction": pointwise,
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": pointwise,
}


@dataclass(frozen=True)
class _Registered:
    cls: Function
    notation: str
    flops: str | None


@lru_cache(maxsize=1024)
def _fitted(op: torch._ops.OpOverload, item: _Registered) -> OpRule:
    """The rule of a class for one of its operators."""
    parsed = Notation.parse(item.notation)
    check_notation(parsed, op)
    if item.flops is not None:
        check_flops(item.flops, parsed, op)
    return OpRule(str(op), item.notation, flops=item.flops, whole_gradients=True)


_registered: dict[str, list[_Registered]] = {}


def is_function(op: str) -> bool:
    """Is this overload name that of an operator made of an `autograd.Function`?"""
    return function_of(op) is not None


def register_function(cls: Function, notation: str, flops: str | None) -> OpRule:
    """Give all calls of a class a rule; a later rule of the class replaces it."""
    others = _registered.setdefault(full_name(cls), [])
    others[:] = [item for item in others if not is_same_function(item.cls, cls)]
    others.append(_Registered(cls, notation, flops))
    return OpRule(full_name(cls), notation, flops=flops, whole_gradients=True)


def function_rule(op: str) -> OpRule | None:
    """The rule of an operator made of a class; None without one.

    Raises `NotationError` or `OptionError` if the rule of the class does not fit this operator.
    """
    function = function_of(op)
    if function is None:
        return None
    name = full_name(function.cls)
    for item in _registered.get(name, ()):
        if is_same_function(item.cls, function.cls):
            return _fitted(function.op, item)
    family = _OF_LIBRARIES.get(name)
    return None if family is None else OpRule(op, family, whole_gradients=True)
