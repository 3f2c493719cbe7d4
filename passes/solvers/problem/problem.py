"""The choice problem: one choice per variable, costs on variables and pairs, one memory budget.

    minimise  sum_v cost_s[v][x_v] + sum_(u,v) cost_s[u,v][r(x_u), c(x_v)]
    such that sum_v bytes[v][x_v]  + sum_(u,v) bytes[u,v][r(x_u), c(x_v)]  <= budget_bytes

`ChoiceProblem.evaluate` computes both sums. Choices that an edge does not distinguish share a row r
or a column c of its arrays.

An infinite cost forbids a choice or a pair. Every solver of one problem returns a `Solution`, or an
`Infeasible` that says how many bytes the leanest choice needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import Array, BoolArray, Codes
from autopar.errors import AutoparError

Choice = tuple[int, ...]
C = TypeVar("C")

# Two costs this close (relative) are one optimum. Sums of a thousand float64 terms differ by up to
# about 1e-13, and no cost model resolves differences this small.
SAME_OPTIMUM_REL = 1e-9
# A budget may be exceeded by this much (relative), for the same reason.
BUDGET_REL = 1e-9


class ProblemError(AutoparError):
    """A choice problem whose numbers make no sense (NaN, negative, wrong shape)."""


class TimeLimitError(AutoparError):
    """A solver ran out of time before it found any choice that satisfies the constraints."""


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost on a pair of variables u != v; `bytes` None means zero.

    Arrays are [rows, columns]. Choices of u that cost the same with every choice of v share a row:
    choice k has row `rows[k]` (None: each has its own). `columns` does the same for v. Reshard
    costs depend on few specs, so the arrays are much smaller than all pairs of choices.
    """

    u: int
    v: int
    cost_s: Array
    bytes: Array | None = None
    rows: Codes | None = None
    columns: Codes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, also where arrays hold several problems."""
        n_rows, n_columns = self.cost_s.shape[-2:]
        return n_rows, n_columns

    def bytes_or_zero(self) -> Array:
        return np.zeros_like(self.cost_s) if self.bytes is None else self.bytes

    def is_of(self, variables: Set[int]) -> bool:
        """Is one of its ends among `variables`?"""
        return self.u in variables or self.v in variables

    def at(self, choice: Sequence[int]) -> tuple[int, int]:
        """The row and column that a choice of all variables selects."""
        row, column = choice[self.u], choice[self.v]
        if self.rows is not None:
            row = int(self.rows[row])
        if self.columns is not None:
            column = int(self.columns[column])
        return row, column

    def dense(self, array: Array) -> Array:
        """One of the arrays with a row and a column per choice: [..., K_u, K_v]."""
        if self.rows is not None:
            array = array[..., self.rows, :]
        if self.columns is not None:
            array = array[..., self.columns]
        return array

    def mapped(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Edge:
        """The edge with `change` applied to each of its arrays."""
        size = None if self.bytes is None else change(self.bytes)
        return Edge(self.u, self.v, change(self.cost_s), size, self.rows, self.columns)

    def turned(self) -> Edge:
        """The same edge, from v to u."""
        cost_s = self.cost_s.swapaxes(-1, -2)
        size = None if self.bytes is None else self.bytes.swapaxes(-1, -2)
        return Edge(self.v, self.u, cost_s, size, self.columns, self.rows)

    def restricted(self, keep_u: BoolArray, keep_v: BoolArray) -> Edge:
        """The edge with only the marked choices."""
        rows, columns = codes_of(self.rows, len(keep_u)), codes_of(self.columns, len(keep_v))
        return replace(self, rows=rows[keep_u], columns=columns[keep_v])


@dataclass(frozen=True)
class ChoiceTotals:
    """The sums of one choice of all variables."""

    cost_s: float
    bytes: float


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """The problem of the module docstring. `cost_s` and `bytes` hold one [K_v] array per variable.

    Parallel edges are allowed and add up. `is_checked` skips the checks, for numbers that were
    checked at their source (`problems.py`).

    Raises `ProblemError` for NaN, negative numbers, infinite bytes, wrong shapes.
    """

    names: tuple[str, ...]
    cost_s: tuple[Array, ...]
    bytes: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    budget_bytes: float | None = None
    is_checked: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and not self.budget_bytes >= 0:
            raise ProblemError(f"budget_bytes must be at least 0: {self.budget_bytes}")
        if self.is_checked:
            return
        check_numbers(self.names, self.cost_s, self.bytes, self.edges, 0)

    @property
    def n_variables(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each variable has."""
        return tuple(len(c) for c in self.cost_s)

    def evaluate(self, choice: Sequence[int]) -> ChoiceTotals:
        """Cost and bytes of one choice, summed exactly (`math.fsum`)."""
        cost = [float(self.cost_s[v][k]) for v, k in enumerate(choice)]
        size = [float(self.bytes[v][k]) for v, k in enumerate(choice)]
        for edge in self.edges:
            at = edge.at(choice)
            cost.append(float(edge.cost_s[at]))
            if edge.bytes is not None:
                size.append(float(edge.bytes[at]))
        return ChoiceTotals(math.fsum(cost), math.fsum(size))

    def restrict(self, keep: Sequence[BoolArray]) -> ChoiceProblem:
        """The same problem with only the choices that `keep[v]` marks."""
        edges = [e.restricted(keep[e.u], keep[e.v]) for e in self.edges]
        return replace(
            self,
            cost_s=tuple(a[k] for a, k in zip(self.cost_s, keep, strict=True)),
            bytes=tuple(a[k] for a, k in zip(self.bytes, keep, strict=True)),
            edges=tuple(edges),
        )

    def merged(self) -> ChoiceProblem:
        """The same problem with `merged` edges."""
        return replace(self, edges=merged(self.edges))


def merged(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """At most one edge per pair, u < v, sorted by (u, v). Parallel edges add up."""
    grouped: dict[tuple[int, int], list[Edge]] = {}
    for e in edges:
        e = e if e.u < e.v else e.turned()
        grouped.setdefault((e.u, e.v), []).append(e)
    sums: dict[Hashable, Edge] = {}  # edges of the same arrays share one sum

    def sum_of(parallel: Sequence[Edge]) -> Edge:
        if len(parallel) == 1:
            return parallel[0]
        key = tuple(
            (memory(e.cost_s, e.bytes), memory(e.rows), memory(e.columns)) for e in parallel
        )
        if key not in sums:
            sums[key] = _sum(parallel)
        return replace(sums[key], u=parallel[0].u, v=parallel[0].v)

    return tuple(sum_of(parallel) for _, parallel in sorted(grouped.items()))


def _sum(edges: Sequence[Edge]) -> Edge:
    """Parallel edges as one. Choices that none of them distinguishes share a row or a column."""
    of_rows, rows = _distinct_kinds([codes_of(e.rows, e.cost_s.shape[-2]) for e in edges])
    of_columns, columns = _distinct_kinds([codes_of(e.columns, e.cost_s.shape[-1]) for e in edges])

    def total(arrays: Iterable[NDArray[Any] | None]) -> NDArray[Any] | None:
        each = zip(arrays, of_rows, of_columns, strict=True)
        found = [a[..., r[:, None], c] for a, r, c in each if a is not None]
        return reduce(np.add, found) if found else None

    cost_s, size_bytes = total(e.cost_s for e in edges), total(e.bytes for e in edges)
    assert cost_s is not None
    return Edge(edges[0].u, edges[0].v, cost_s, size_bytes, rows, columns)


def codes_of(codes: Codes | None, n_choices: int) -> Codes:
    """The row of every choice. `codes` None: each choice has its own."""
    return np.arange(n_choices) if codes is None else codes


def _distinct_kinds(codes: Sequence[Codes]) -> tuple[Codes, Codes | None]:
    """The kinds of choices that parallel edges distinguish: (the codes of every kind [edges,
    kinds], the kind of every choice). The second is None where each choice is its own kind."""
    every = np.stack(codes)
    kinds, kind_of = np.unique(every, axis=1, return_inverse=True)
    return (every, None) if kinds.shape == every.shape else (kinds, kind_of.ravel())


def memory(*arrays: NDArray[Any] | None) -> Hashable:
    """A key that is equal for arrays of the same memory."""
    return tuple((a.ctypes.data, a.shape, a.strides) for a in arrays if a is not None)


def within(budget_bytes: float | None, size_bytes: float) -> bool:
    """Do `size_bytes` fit in the budget (to `BUDGET_REL`)?"""
    return budget_bytes is None or size_bytes <= budget_bytes * (1 + BUDGET_REL)


def check_numbers(
    names: Sequence[str],
    cost_s: Sequence[Array],
    size_bytes: Sequence[Array],
    edges: Sequence[Edge],
    n_axes_before: int,
) -> None:
    """Check the numbers of one problem, or of several, whose arrays have `n_axes_before` more axes.

    Raises `ProblemError` for NaN, negative numbers, infinite bytes, wrong shapes.
    """
    n, lead, sound = len(names), n_axes_before, set[tuple[int, bool]]()
    ranges: dict[int, tuple[int, int]] = {}
    if not len(cost_s) == len(size_bytes) == n:
        raise ProblemError(f"{n} names need as many arrays of costs and of bytes")
    sizes = [array.shape[-1] for array in cost_s]
    for v, name in enumerate(names):
        if not sizes[v]:
            raise ProblemError(f"variable {name!r} has no choice at all")
        _check(sound, name, (sizes[v],), lead, cost_s[v], size_bytes[v])
    for edge in edges:
        if not (0 <= edge.u < n and 0 <= edge.v < n and edge.u != edge.v):
            raise ProblemError(f"edge ({edge.u}, {edge.v}) must join two of {n} variables")
        name = f"{names[edge.u]} -> {names[edge.v]}"
        shape = tuple(
            _n_codes(ranges, name, codes, sizes[w], edge.cost_s.shape[lead + k])
            for k, (w, codes) in enumerate(((edge.u, edge.rows), (edge.v, edge.columns)))
        )
        _check(sound, name, shape, lead, edge.cost_s, edge.bytes)


def _n_codes(
    ranges: dict[int, tuple[int, int]], name: str, codes: Codes | None, n_choices: int, n: int
) -> int:
    """The length that an axis of an edge should have. `ranges` caches the least and largest code by
    array, because edges share arrays."""
    if codes is None:
        return n_choices
    if id(codes) not in ranges:
        ranges[id(codes)] = int(codes.min(initial=n)), int(codes.max(initial=0))
    least, most = ranges[id(codes)]
    if len(codes) != n_choices or least < 0 or most >= n:
        raise ProblemError(f"{name!r}: {n_choices} choices need one code each, from 0 to below {n}")
    return n


def _check(
    sound: set[tuple[int, bool]], name: str, shape: tuple[int, ...], lead: int,
    cost: Array, size_bytes: Array | None,
) -> None:  # fmt: skip
    """Check the arrays of one variable or edge. `sound` holds the arrays that passed, and whether
    as costs, because variables share arrays."""
    for array in (cost, size_bytes):
        if array is not None and array.shape[lead:] != shape:
            raise ProblemError(f"{name!r}: an array of shape {array.shape} should be {shape}")
    # min() of an array with a NaN is NaN, which fails the comparison.
    if (id(cost), True) not in sound and not cost.min(initial=0.0) >= 0:
        raise ProblemError(
            f"{name!r}: a cost is NaN or negative",
            hint="an estimate failed; forbid a choice with inf instead",
        )
    sound.add((id(cost), True))
    if size_bytes is not None and (id(size_bytes), False) not in sound:
        if not (size_bytes.min(initial=0.0) >= 0 and size_bytes.max(initial=0.0) < np.inf):
            raise ProblemError(f"{name!r}: bytes must be finite and not negative")
        sound.add((id(size_bytes), False))


@dataclass(frozen=True)
class Solution(Generic[C]):
    """A choice that satisfies the constraints, and how far (relative) it may be from the cheapest
    (0: optimal to `SAME_OPTIMUM_REL`). If it is not `settled`, it only shows that no choice is
    below the limit that was asked for."""

    choice: C
    totals: ChoiceTotals
    gap: float
    settled: bool = True

    @property
    def bound_s(self) -> float:
        """A proven lower bound on the cost of every choice within the budget."""
        return self.totals.cost_s * (1 - self.gap)


@dataclass(frozen=True)
class Infeasible:
    """No choice satisfies the constraints.

    `min_bytes` is the least that any choice needs. None: forbidden pairs alone rule out every
    choice, or the least is not known.
    """

    reason: str
    min_bytes: float | None


def make_solution(
    problem: ChoiceProblem, choice: Sequence[int], bound_s: float | None
) -> Solution[Choice]:
    """Evaluate `choice` on `problem`. `bound_s` None: it is proven optimal."""
    totals = problem.evaluate(choice)
    assert math.isfinite(totals.cost_s) and within(problem.budget_bytes, totals.bytes), totals
    gap = 0.0
    if bound_s is not None and bound_s < totals.cost_s * (1 - SAME_OPTIMUM_REL):
        gap = 1 - max(bound_s, 0.0) / totals.cost_s
    return Solution(tuple(int(k) for k in choice), totals, gap)


def infeasible_budget(budget_bytes: float | None, min_bytes: float) -> Infeasible:
    """The `Infeasible` of a problem whose leanest choice exceeds the budget."""
    return Infeasible(
        f"the leanest choice needs {min_bytes:.0f} bytes, the budget is {budget_bytes}",
        min_bytes,
    )


FORBIDDEN = Infeasible("forbidden choices and pairs rule out every choice", None)
