"""Formulas over the names of a notation: flops, bytes and sizes of collectives.

`lead` in a formula is the product of the names that begin with `_` (an operator's batch dims,
however many). A name without a size counts 1: its dim has one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import mul

import numpy as np
import sympy
from numpy.typing import NDArray

Sizes = NDArray[np.int64]
LEAD = "lead"
# One-letter names that sympy would read as constants.
_NAMES = ("E", "I", "N", "O", "Q", "S", "beta", "gamma", "zeta")


def evaluate(formula: str, sizes: Mapping[str, float]) -> float:
    """The value of a formula where the names have these sizes."""
    names, function = _compiled(formula)
    known = {LEAD: leading(sizes), **sizes}
    return float(function(**{n: known.get(n, 1.0) for n in names}))


def evaluate_all(formula: str, sizes: Mapping[str, int | Sizes]) -> NDArray[np.float64]:
    """`evaluate` for arrays of sizes, which broadcast; of a formula without `Max`."""
    names, function = _compiled(formula)
    lead = reduce(mul, (size for name, size in sizes.items() if name.startswith("_")), 1)
    known = {LEAD: lead, **sizes}
    return np.asarray(function(**{n: known.get(n, 1) for n in names}), dtype=np.float64)


def names_of(formula: str) -> tuple[str, ...]:
    """The names a formula speaks of; raises what sympy raises for one that is malformed."""
    return _compiled(formula)[0]


def leading(sizes: Mapping[str, float]) -> float:
    return math.prod(size for name, size in sizes.items() if name.startswith("_"))


@lru_cache(maxsize=256)
def _compiled(formula: str) -> tuple[tuple[str, ...], Callable[..., float]]:
    expression = sympy.sympify(formula, locals={n: sympy.Symbol(n) for n in _NAMES})
    names = tuple(sorted(str(s) for s in expression.free_symbols))
    return names, sympy.lambdify([sympy.Symbol(n) for n in names], expression, "math")
