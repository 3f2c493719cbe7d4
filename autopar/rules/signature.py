"""Checks that a rule fits its operator, by the operator's signature.

The signature lists the tensors: required ones, optional ones, and lists of tensors. A notation has
one term for each tensor, in order. If a call leaves optional tensors out, their terms are dropped.
So a mistake is found when a rule is registered, not when a model uses the operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import NotationError, NotSupportedError, OptionError
from autopar.placement import ELLIPSIS, Notation
from autopar.rules.formulas import LEAD, names_of

_OPTIONAL, _LIST = "Optional", "List"


def _tensors(arguments: Sequence[Any]) -> dict[str, str]:
    """The tensors among arguments or results: name -> type."""
    types = {a.name or f"#{i}": str(a.type) for i, a in enumerate(arguments)}
    return {name: kind for name, kind in types.items() if "Tensor" in kind}


def without_absent(
    notation: Notation, op: torch._ops.OpOverload, args: Mapping[str, Any]
) -> Notation:
    """The notation without the terms of optional tensors that the call leaves out.

    A notation that has no terms for optional tensors is returned unchanged.
    """
    given: list[bool] = []
    for name in _tensors(op._schema.arguments):
        value = args[name]
        items = value if isinstance(value, (list, tuple)) else (value,)
        given += [item is not None for item in items]
    if len(given) != len(notation.inputs):
        return notation
    pairs = zip(notation.inputs, given, strict=True)
    return replace(notation, inputs=tuple(term for term, is_given in pairs if is_given))


def check_operator(op: torch._ops.OpOverload) -> None:
    """Raises `NotSupportedError` for an operator that no rule can describe."""
    if op._schema.is_mutable:
        raise NotSupportedError(
            f"no rule can describe {op}: it writes to its arguments",
            hint="register a version that returns what it computes",
        )
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotSupportedError(
            f"no rule can describe {op}: it draws random numbers, different ones on each rank",
            hint="draw them with torch.rand in the model, and pass them to the operator",
        )


def check_notation(notation: Notation, op: torch._ops.OpOverload) -> None:
    """Raises `NotationError` if the terms cannot be the operator's tensors."""
    sides = (
        ("inputs", notation.inputs, op._schema.arguments),
        ("outputs", notation.outputs, op._schema.returns),
    )
    for side, terms, arguments in sides:
        tensors = _tensors(arguments)
        if any(_LIST in kind for kind in tensors.values()):
            continue
        least = sum(_OPTIONAL not in kind for kind in tensors.values())
        # Nothing on one side of the arrow reads as one term without dims.
        n_terms = 0 if not tensors and terms == ((),) else len(terms)
        if not least <= n_terms <= len(tensors):
            raise NotationError(
                f'{op}: {side} of "{notation}": {n_terms} written, but the operator has '
                f"{len(tensors)} ({', '.join(tensors) or 'none'})",
                hint="write one term per tensor, in the order of the signature",
            )


def check_flops(flops: str, notation: Notation, op: torch._ops.OpOverload) -> None:
    """Raises `OptionError` for a malformed formula, or for names that the notation lacks."""
    try:
        names = names_of(flops)
    except (ArithmeticError, SyntaxError, TypeError, ValueError) as error:
        raise OptionError(
            f"{op}: flops {flops!r} is not a formula", hint='write for example "2*m*k*n"'
        ) from error
    known = {name for name in notation.names if (name,) != ELLIPSIS}
    unknown = [name for name in names if name not in known | {LEAD}]
    if unknown:
        raise OptionError(
            f'{op}: flops {flops!r} names {", ".join(unknown)}, which "{notation}" does not',
            hint=f"its names are {', '.join(sorted(known))}",
        )
