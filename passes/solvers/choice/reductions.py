"""Choices that cannot matter, dropped before any solver runs; the optimum is unchanged.

- A choice is *impossible* when its cost is infinite, or when some neighbour has no choice
  left that it may be paired with (`drop_forbidden`, to a fixpoint).
- A choice is *dominated* when another choice of the same variable is no worse in cost and
  bytes, on the variable and in every entry of every incident edge (`drop_dominated`). Of
  equal choices the first stays. Replacing a choice by one that dominates it makes nothing
  worse, so this holds under a budget.

`reduce` returns the smaller problem and, per variable, the original index of each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, BoolArray, Codes
from autopar.passes.solvers.problem import Choice, ChoiceProblem, Edge, codes_of, compiled

# Dropping choices makes others dominated; a few rounds find nearly all of them.
MAX_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Reduced:
    """A restricted problem; `kept[v][k]` is the original index of its choice k."""

    problem: ChoiceProblem
    kept: tuple[Codes, ...]

    @staticmethod
    def whole(problem: ChoiceProblem) -> Reduced:
        """All choices."""
        return Reduced(problem, tuple(np.arange(k) for k in problem.sizes))

    def lift(self, choice: Sequence[int]) -> Choice:
        """A choice of the restricted problem in the original's indices."""
        return tuple(int(kept[k]) for kept, k in zip(self.kept, choice, strict=True))


def reduce(problem: ChoiceProblem | Reduced) -> Reduced | None:
    """Drop impossible and dominated choices and merge parallel edges; None: nothing is left."""
    if isinstance(problem, ChoiceProblem):
        problem = Reduced.whole(problem.merged())
    reduced = drop_forbidden(problem)
    for _ in range(MAX_ROUNDS):
        if reduced is None:
            return None
        before = sum(reduced.problem.sizes)
        reduced = drop_dominated(reduced)
        if sum(reduced.problem.sizes) == before:
            break
    return reduced


def restrict(reduced: Reduced, keep: Sequence[BoolArray]) -> Reduced:
    """Keep only the marked choices of a reduced problem."""
    kept = tuple(k[mask] for k, mask in zip(reduced.kept, keep, strict=True))
    return Reduced(reduced.problem.restrict(keep), kept)


def drop_forbidden(reduced: Reduced) -> Reduced | None:
    """Remove impossible choices until there are none; None: a variable loses all of its choices."""
    *_, keep = _possible(reduced.problem)
    if not all(mask.any() for mask in keep):
        return None
    return reduced if all(mask.all() for mask in keep) else restrict(reduced, keep)


def conflict(problem: ChoiceProblem) -> tuple[str, ...]:
    """The name of a variable that loses all of its choices, and of its neighbours that take the
    last of them; empty if pairs of choices alone do not show why there is none."""
    rounds = list(_possible(problem))
    empty = next((v for v, mask in enumerate(rounds[-1]) if not mask.any()), None)
    if empty is None:
        return ()
    left = rounds[max(len(rounds) - 2, 0)]
    takers = [
        problem.names[pairs.there]
        for pairs in _hard_pairs(problem)
        if pairs.here == empty and (left[empty] & ~pairs.possible(left[pairs.there])).any()
    ]
    return problem.names[empty], *dict.fromkeys(takers)


@dataclass(frozen=True, eq=False)
class _HardPairs:
    """[kinds, kinds]: may kinds of choices of two variables be together? `rows` and `columns` have
    the kind of each choice, `here` and `there`."""

    here: int
    rows: Codes
    there: int
    columns: Codes
    allowed: BoolArray

    def possible(self, left_there: BoolArray) -> BoolArray:
        """The choices here that one of the choices left there may be paired with."""
        kinds = np.zeros(self.allowed.shape[1], dtype=bool)
        kinds[self.columns[left_there]] = True
        return np.any(self.allowed & kinds, axis=1)[self.rows]


def _hard_pairs(problem: ChoiceProblem) -> Iterator[_HardPairs]:
    """Of every edge that forbids a pair, seen from both ends."""
    for e in problem.edges:
        allowed = np.isfinite(e.cost_s)
        if not allowed.all():
            rows = codes_of(e.rows, problem.sizes[e.u])
            columns = codes_of(e.columns, problem.sizes[e.v])
            yield _HardPairs(e.u, rows, e.v, columns, allowed)
            yield _HardPairs(e.v, columns, e.u, rows, allowed.T)


def _possible(problem: ChoiceProblem) -> Iterator[list[BoolArray]]:
    """The choices that variables have left, round by round; the last round drops none, or leaves a
    variable without any."""
    keep = [np.isfinite(c) for c in problem.cost_s]
    yield keep
    hard = list(_hard_pairs(problem))
    while all(mask.any() for mask in keep):
        before, keep = keep, [mask.copy() for mask in keep]
        for pairs in hard:
            keep[pairs.here] &= pairs.possible(before[pairs.there])
        yield keep
        if all(left.sum() >= was.sum() for left, was in zip(keep, before, strict=True)):
            return


def drop_dominated(reduced: Reduced) -> Reduced:
    """One pass over the variables. Each sees what the earlier ones kept."""
    problem = reduced.problem
    incident: list[list[Edge]] = [[] for _ in problem.names]
    for e in problem.edges:
        incident[e.u].append(e)
        incident[e.v].append(e)
    keep: list[BoolArray] = [np.ones(k, dtype=bool) for k in problem.sizes]
    for v, n in enumerate(problem.sizes):
        if n > 1:
            keep[v] = _undominated(n, _tables(problem, v, incident[v], keep))
    return reduced if all(mask.all() for mask in keep) else restrict(reduced, keep)


def _tables(
    problem: ChoiceProblem, v: int, incident: Sequence[Edge], keep: Sequence[BoolArray]
) -> Iterator[tuple[Array, Codes]]:
    """(array, row of every choice) of a variable's own costs and of its edges, restricted to the
    choices that other variables keep."""
    with_bytes = problem.budget_bytes is not None
    every = np.arange(problem.sizes[v])
    for own in (problem.cost_s[v], *([problem.bytes[v]] if with_bytes else [])):
        yield own[:, None], every
    for e in incident:
        e = e if e.u == v else e.turned()
        rows = codes_of(e.rows, problem.sizes[v])
        seen = np.unique(codes_of(e.columns, problem.sizes[e.v])[keep[e.v]])
        for array in (e.cost_s, e.bytes if with_bytes else None):
            if array is not None:
                yield np.take(array, seen, axis=1), rows


def _undominated(n: int, tables: Iterable[tuple[Array, Codes]]) -> BoolArray:
    """[n]: is the choice dominated by no other? A choice dominates another if it is <= in every
    entry of its row, in every table."""
    better, worse = np.nonzero(~np.eye(n, dtype=bool))
    for table, rows in tables:
        # Few pairs survive the first, narrow tables, so few are compared in the wide ones.
        n_left = _nowhere_above(table, rows, better, worse)
        better, worse = better[:n_left], worse[:n_left]
        if not n_left:
            break
    pairs = np.zeros((n, n), dtype=bool)
    pairs[better, worse] = True
    # Equal choices dominate each other: only the later one is dropped.
    dominates = pairs & (~pairs.T | np.triu(np.ones((n, n), dtype=bool)))
    out: BoolArray = np.logical_not(dominates.any(axis=0))
    return out


@compiled
def _nowhere_above(table: Array, rows: Codes, better: Codes, worse: Codes) -> int:
    """Move the pairs with table[rows[better]] <= table[rows[worse]] in all entries to the front;
    returns how many they are."""
    # By pair of rows, since choices share rows: 0 not compared, 1 nowhere above, 2 above.
    known = np.zeros((len(table), len(table)), dtype=np.int8)
    n_left = 0
    for i in range(len(better)):
        a, b = rows[better[i]], rows[worse[i]]
        if known[a, b] == 0:
            known[a, b] = 1
            for k in range(table.shape[1]):
                if not table[a, k] <= table[b, k]:
                    known[a, b] = 2
                    break
        if known[a, b] == 1:
            better[n_left], worse[n_left] = better[i], worse[i]
            n_left += 1
    return n_left
