"""A choice problem: one index per variable, costs on variables and pairs, one memory budget.

    minimise  sum_v cost_s[v][x_v] + sum_(u,v) cost_s[u,v][r(x_u), c(x_v)]
    such that sum_v bytes[v][x_v]  + sum_(u,v) bytes[u,v][r(x_u), c(x_v)]  <= budget_bytes

Choices that an edge does not tell apart share a row r or a column c of its arrays.

An infinite cost forbids a choice or a pair. Among the choices whose cost is within
`SAME_OPTIMUM_REL` of the least, the one of least `tie` (a second cost of no unit) is wanted.
Every solver of this package takes a `ChoiceProblem` and returns a `Solution`, or an
`Infeasible` that says how many bytes the leanest choice needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError

FloatArray = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]  # of any precision: ties of edges, which are many, in single
BoolArray = NDArray[np.bool_]
Codes = NDArray[np.intp]
Choice = tuple[int, ...]

# Two costs this close (relative) are one optimum: sums of a thousand float64 terms differ by
# up to about 1e-13, and nothing a cost model tells apart is as close as this.
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

    Arrays are [rows, columns]. Choices of u that cost the same beside everything of v share a row:
    choice k has row `rows[k]`, or None: every choice has its own; the same with `columns`, of v.
    What a reshard costs is known of few specs, so arrays are much smaller than all pairs.
    """

    u: int
    v: int
    cost_s: FloatArray
    tie: Floats
    bytes: FloatArray | None = None
    rows: Codes | None = None
    columns: Codes | None = None

    def bytes_or_zero(self) -> FloatArray:
        return np.zeros_like(self.cost_s) if self.bytes is None else self.bytes

    def is_of(self, variables: Set[int]) -> bool:
        """Is one of its ends among some variables?"""
        return self.u in variables or self.v in variables

    def at(self, choice: Sequence[int]) -> tuple[int, int]:
        """The row and column of one choice of all variables."""
        row, column = choice[self.u], choice[self.v]
        if self.rows is not None:
            row = int(self.rows[row])
        if self.columns is not None:
            column = int(self.columns[column])
        return row, column

    def written(self, array: Floats) -> Floats:
        """One of the arrays with a row and a column per choice: [..., K_u, K_v]."""
        if self.rows is not None:
            array = array[..., self.rows, :]
        if self.columns is not None:
            array = array[..., self.columns]
        return array

    def mapped(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Edge:
        """With each of its arrays changed."""
        size = None if self.bytes is None else change(self.bytes)
        cost_s, tie = change(self.cost_s), change(self.tie)
        return Edge(self.u, self.v, cost_s, tie, size, self.rows, self.columns)

    def turned(self) -> Edge:
        """The same, from v to u."""
        cost_s, tie = self.cost_s.swapaxes(-1, -2), self.tie.swapaxes(-1, -2)
        size = None if self.bytes is None else self.bytes.swapaxes(-1, -2)
        return Edge(self.v, self.u, cost_s, tie, size, self.columns, self.rows)

    def restricted(self, keep_u: BoolArray, keep_v: BoolArray) -> Edge:
        """With only the choices that are marked."""
        rows, columns = codes_of(self.rows, len(keep_u)), codes_of(self.columns, len(keep_v))
        return replace(self, rows=rows[keep_u], columns=columns[keep_v])


@dataclass(frozen=True)
class ChoiceTotals:
    """What one choice for every variable sums to."""

    cost_s: float
    tie: float
    bytes: float


@dataclass(frozen=True, eq=False)
class ChoiceProblem:
    """See the module docstring. `cost_s`, `tie`, `bytes` hold one [K_v] array per variable.

    Parallel edges are allowed and add up. `tie` should be of order 1 to 1000 in total, with
    differences that matter above 1e-3: it is weighed at 1e-11 of the cost.

    Raises `ProblemError` for NaN, negative numbers, infinite ties or bytes, wrong shapes; unless
    it `is_checked` where the numbers come from (`problems.py`).
    """

    names: tuple[str, ...]
    cost_s: tuple[FloatArray, ...]
    tie: tuple[FloatArray, ...]
    bytes: tuple[FloatArray, ...]
    edges: tuple[Edge, ...] = ()
    budget_bytes: float | None = None
    is_checked: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and not self.budget_bytes >= 0:
            raise ProblemError(f"budget_bytes must be at least 0: {self.budget_bytes}")
        if self.is_checked:
            return
        check_numbers(self.names, self.cost_s, self.tie, self.bytes, self.edges, 0)

    @property
    def n_variables(self) -> int:
        return len(self.names)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each variable has."""
        return tuple(len(c) for c in self.cost_s)

    def evaluate(self, choice: Sequence[int]) -> ChoiceTotals:
        """Cost, tie and bytes of one choice, summed exactly (`math.fsum`)."""
        cost = [float(self.cost_s[v][k]) for v, k in enumerate(choice)]
        tie = [float(self.tie[v][k]) for v, k in enumerate(choice)]
        size = [float(self.bytes[v][k]) for v, k in enumerate(choice)]
        for edge in self.edges:
            at = edge.at(choice)
            cost.append(float(edge.cost_s[at]))
            tie.append(float(edge.tie[at]))
            if edge.bytes is not None:
                size.append(float(edge.bytes[at]))
        return ChoiceTotals(math.fsum(cost), math.fsum(tie), math.fsum(size))

    def fits(self, size_bytes: float) -> bool:
        """Is `size_bytes` within the budget (to `BUDGET_REL`)?"""
        return within(self.budget_bytes, size_bytes)

    def restrict(self, keep: Sequence[BoolArray]) -> ChoiceProblem:
        """The same problem with only the choices that `keep[v]` marks."""
        edges = [e.restricted(keep[e.u], keep[e.v]) for e in self.edges]
        return replace(
            self,
            cost_s=tuple(a[k] for a, k in zip(self.cost_s, keep, strict=True)),
            tie=tuple(a[k] for a, k in zip(self.tie, keep, strict=True)),
            bytes=tuple(a[k] for a, k in zip(self.bytes, keep, strict=True)),
            edges=tuple(edges),
        )

    def merged(self) -> ChoiceProblem:
        """The same problem with `merged` edges."""
        return replace(self, edges=merged(self.edges))

    def times(self, n: float, stored: Set[int]) -> ChoiceProblem:
        """With n times the bytes of all but `stored` variables and their edges; those that are the
        same memory stay so."""
        known = dict[Hashable, FloatArray]()

        def grown(array: FloatArray) -> FloatArray:
            key = memory(array)
            if key not in known:
                known[key] = array * n
            return known[key]

        edges = (
            e if e.bytes is None or e.is_of(stored) else replace(e, bytes=grown(e.bytes))
            for e in self.edges
        )
        own = (a if v in stored else grown(a) for v, a in enumerate(self.bytes))
        return replace(self, bytes=tuple(own), edges=tuple(edges))

    def has_ties(self) -> bool:
        """Is any tie not zero, so that breaking ties means anything?"""
        return any(np.any(t) for t in self.tie) or any(np.any(e.tie) for e in self.edges)


def merged(edges: Iterable[Edge]) -> tuple[Edge, ...]:
    """At most one edge per pair, u < v, sorted by (u, v): parallel ones add up."""
    grouped: dict[tuple[int, int], list[Edge]] = {}
    for e in edges:
        e = e if e.u < e.v else e.turned()
        grouped.setdefault((e.u, e.v), []).append(e)
    sums: dict[Hashable, Edge] = {}  # edges of the same arrays have one sum

    def sum_of(parallel: Sequence[Edge]) -> Edge:
        if len(parallel) == 1:
            return parallel[0]
        key = tuple(
            (memory(e.cost_s, e.tie, e.bytes), memory(e.rows), memory(e.columns)) for e in parallel
        )
        if key not in sums:
            sums[key] = _sum(parallel)
        return replace(sums[key], u=parallel[0].u, v=parallel[0].v)

    return tuple(sum_of(parallel) for _, parallel in sorted(grouped.items()))


def _sum(edges: Sequence[Edge]) -> Edge:
    """Parallel edges as one; what none of them tells apart shares a row or a column of it too."""
    of_rows, rows = _told_apart([codes_of(e.rows, e.cost_s.shape[-2]) for e in edges])
    of_columns, columns = _told_apart([codes_of(e.columns, e.cost_s.shape[-1]) for e in edges])

    def total(arrays: Iterable[NDArray[Any] | None]) -> NDArray[Any] | None:
        each = zip(arrays, of_rows, of_columns, strict=True)
        found = [a[..., r[:, None], c] for a, r, c in each if a is not None]
        return reduce(np.add, found) if found else None

    cost_s, tie = total(e.cost_s for e in edges), total(e.tie for e in edges)
    assert cost_s is not None and tie is not None
    size_bytes = total(e.bytes for e in edges)
    return Edge(edges[0].u, edges[0].v, cost_s, tie, size_bytes, rows, columns)


def codes_of(codes: Codes | None, n_choices: int) -> Codes:
    """The row of every choice; None: each has its own."""
    return np.arange(n_choices) if codes is None else codes


def _told_apart(codes: Sequence[Codes]) -> tuple[Codes, Codes | None]:
    """The kinds of choices of a variable that edges tell apart by their codes: the code of every
    kind, [edges, kinds], and the kind of every choice, None where each is its own."""
    every = np.stack(codes)
    kinds, kind_of = np.unique(every, axis=1, return_inverse=True)
    return (every, None) if kinds.shape == every.shape else (kinds, kind_of.ravel())


def memory(*arrays: NDArray[Any] | None) -> Hashable:
    """Equal for arrays that are the same memory."""
    return tuple((a.ctypes.data, a.shape, a.strides) for a in arrays if a is not None)


def within(budget_bytes: float | None, size_bytes: float) -> bool:
    """Do `size_bytes` fit in a budget (to `BUDGET_REL`)?"""
    return budget_bytes is None or size_bytes <= budget_bytes * (1 + BUDGET_REL)


def check_numbers(
    names: Sequence[str],
    cost_s: Sequence[FloatArray],
    tie: Sequence[FloatArray],
    size_bytes: Sequence[FloatArray],
    edges: Sequence[Edge],
    n_axes_before: int,
) -> None:
    """Raise `ProblemError` where the numbers of a problem, or of several, make no sense."""
    n, lead, sound = len(names), n_axes_before, set[tuple[int, bool]]()
    ranges: dict[int, tuple[int, int]] = {}
    if not len(cost_s) == len(tie) == len(size_bytes) == n:
        raise ProblemError(f"{n} names need as many cost, tie and bytes arrays")
    sizes = [array.shape[-1] for array in cost_s]
    for v, name in enumerate(names):
        if not sizes[v]:
            raise ProblemError(f"variable {name!r} has no choice at all")
        _check(sound, name, (sizes[v],), lead, cost_s[v], tie[v], size_bytes[v])
    for edge in edges:
        if not (0 <= edge.u < n and 0 <= edge.v < n and edge.u != edge.v):
            raise ProblemError(f"edge ({edge.u}, {edge.v}) must join two of {n} variables")
        name = f"{names[edge.u]} -> {names[edge.v]}"
        shape = tuple(
            _n_codes(ranges, name, codes, sizes[w], edge.cost_s.shape[lead + k])
            for k, (w, codes) in enumerate(((edge.u, edge.rows), (edge.v, edge.columns)))
        )
        _check(sound, name, shape, lead, edge.cost_s, edge.tie, edge.bytes)


def _n_codes(
    ranges: dict[int, tuple[int, int]], name: str, codes: Codes | None, n_choices: int, n: int
) -> int:
    """How long an axis of an edge should be; `ranges` are the least and largest codes of arrays
    that have been seen: edges share them."""
    if codes is None:
        return n_choices
    if id(codes) not in ranges:
        ranges[id(codes)] = int(codes.min(initial=n)), int(codes.max(initial=0))
    least, most = ranges[id(codes)]
    if len(codes) != n_choices or least < 0 or most >= n:
        raise ProblemError(f"{name!r}: {n_choices} choices need as many rows among {n}")
    return n


def _check(
    sound: set[tuple[int, bool]], name: str, shape: tuple[int, ...], lead: int,
    cost: FloatArray, *others: Floats | None,
) -> None:  # fmt: skip
    """`sound` are the arrays, and whether as costs, that have been found so: variables share
    them."""
    for array in (cost, *others):
        if array is not None and array.shape[lead:] != shape:
            raise ProblemError(f"{name!r}: an array of shape {array.shape} should be {shape}")
    # The least of numbers of which one is NaN is NaN.
    if (id(cost), True) not in sound and not cost.min(initial=0.0) >= 0:
        raise ProblemError(
            f"{name!r}: a cost is NaN or negative",
            hint="an estimate failed; forbid a choice with inf instead",
        )
    sound.add((id(cost), True))
    for array in others:
        if array is None or (id(array), False) in sound:
            continue
        if not (array.min(initial=0.0) >= 0 and array.max(initial=0.0) < np.inf):
            raise ProblemError(f"{name!r}: ties and bytes must be finite and not negative")
        sound.add((id(array), False))


@dataclass(frozen=True)
class Solution:
    """A choice that satisfies the constraints and what is proven about it.

    `bound_s` is a proven lower bound on every feasible cost and `gap` the relative distance
    of `objective_s` to it (0: optimal to `SAME_OPTIMUM_REL`). `phase_s` is the wall time of
    each phase; it is not part of equality, so that equal runs give equal solutions.
    """

    choice: Choice
    objective_s: float
    bound_s: float
    gap: float
    tie: float
    bytes: float
    method: str
    phase_s: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Infeasible:
    """No choice satisfies the constraints.

    `min_bytes` is the least any choice needs, None when forbidden pairs alone rule out every
    choice, whatever the memory.
    """

    reason: str
    min_bytes: float | None


def make_solution(
    problem: ChoiceProblem,
    choice: Sequence[int],
    bound_s: float | None,
    method: str,
    phase_s: Mapping[str, float] | None = None,
) -> Solution:
    """Evaluate `choice` on `problem`; `bound_s` None means that it is proven optimal."""
    totals = problem.evaluate(choice)
    assert math.isfinite(totals.cost_s) and problem.fits(totals.bytes), (method, totals)
    gap, bound = 0.0, totals.cost_s
    if bound_s is not None and bound_s < totals.cost_s * (1 - SAME_OPTIMUM_REL):
        bound, gap = max(bound_s, 0.0), 1 - max(bound_s, 0.0) / totals.cost_s
    return Solution(
        choice=tuple(int(k) for k in choice),
        objective_s=totals.cost_s,
        bound_s=bound,
        gap=gap,
        tie=totals.tie,
        bytes=totals.bytes,
        method=method,
        phase_s=dict(phase_s or {}),
    )


def over_budget(budget_bytes: float | None, min_bytes: float) -> Infeasible:
    """The `Infeasible` of a problem whose leanest choice exceeds the budget."""
    return Infeasible(
        f"the leanest choice needs {min_bytes:.0f} bytes, the budget is {budget_bytes}",
        min_bytes,
    )


FORBIDDEN = Infeasible("forbidden choices and pairs rule out every choice", None)
