"""Choices that are impossible, dropped before a solver runs; the optimum is unchanged.

A choice is *impossible* if its cost is infinite, or if some neighbour has no choice left that it
may be paired with (`drop_forbidden`, to a fixpoint). `Reduced` is the smaller problem and, per
variable, the original index of each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import BoolArray, Codes
from autopar.passes.solvers.problem import Choice, ChoiceProblem, codes_of


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
