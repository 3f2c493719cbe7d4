"""Formulas over the names of a notation: FLOPs, bytes and sizes of collectives.

In a formula, `lead` is the product of all names that begin with `_`: the batch dims of an operator
of any rank. A name without a size counts as 1, because its dim has one element.
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
    """The value of a formula for these sizes of the names."""
    names, function = _compiled(formula)
    known = {LEAD: leading(sizes), **sizes}
    return float(function(**{n: known.get(n, 1.0) for n in names}))


def evaluate_all(formula: str, sizes: Mapping[str, float | Sizes]) -> NDArray[np.float64]:
    """`evaluate` for arrays of sizes, which broadcast."""
    names, function = _compiled(formula)
    lead = reduce(mul, (size for name, size in sizes.items() if name.startswith("_")), 1)
    known = {LEAD: lead, **sizes}
    return np.asarray(function(**{n: known.get(n, 1) for n in names}), dtype=np.float64)


def names_of(formula: str) -> tuple[str, ...]:
    """The names in a formula; raises sympy's error if the formula is malformed."""
    return _compiled(formula)[0]


def leading(sizes: Mapping[str, float]) -> float:
    return math.prod(size for name, size in sizes.items() if name.startswith("_"))


@lru_cache(maxsize=256)
def _compiled(formula: str) -> tuple[tuple[str, ...], Callable[..., float]]:
    expression = sympy.sympify(formula, locals={n: sympy.Symbol(n) for n in _NAMES})
    names = tuple(sorted(str(s) for s in expression.free_symbols))
    symbols = [sympy.Symbol(n) for n in names]
    of_arrays = {
        "Max": lambda *of: reduce(np.maximum, of),
        "Min": lambda *of: reduce(np.minimum, of),
        "floor": np.floor,
    }
    return names, sympy.lambdify(symbols, expression, [of_arrays, "math"])
