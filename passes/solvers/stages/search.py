"""Where the model is cut into pipeline stages, and each stage's configuration: exact search.

The objective (`problem.py`) is a sum plus two maxima. For limits t, o on the stages' times and
once-per-step costs let f(t, o) be the least sum of times (`tables.py`). Then

    optimum = min over t, o of  f(t, o) + (B - 1) t + o

over the values that occur (the recurrence of Alpa, OSDI 2022, section 5.2). With thousands of
values, trying all pairs is infeasible. It is not needed either: f falls as its limits rise, so
every plan whose largest time and once cost lie in a box [t_lo, t_hi] x [o_lo, o_hi] costs at least

    f(t_hi, o_hi) + (B - 1) t_lo + o_lo                                   (`_Search._bound`)

Boxes are opened by least bound (`_Search.run`). The best plans at the upper corner are candidates.
The part of the box that they dominate is cut off (`_Search._remainders`), the rest is halved
(`_Search._halves`). The search ends when no bound is below the best plan so far.

Order. Plans are ranked by (objective, number of stages, stages). For `n_best` = K, take the first K
plans at a corner by (sum, number of stages, stages). They contain every plan of global rank <= K
that attains both limits: a plan ranked before it at that corner is ranked before it everywhere.
Times are rounded to whole multiples of about 1e-13 of a known plan's objective (`_Scaled`). Sums
are then exact, so ties do not depend on the order of summation. One stage counts as one unit below
the smallest time, which ranks by number of stages.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.errors import OptionError
from autopar.passes.solvers.problem import SAME_OPTIMUM_REL, FloatArray, Infeasible
from autopar.passes.solvers.stages.problem import (
    StageChoice,
    StagePlan,
    StageProblem,
    too_little_memory,
)
from autopar.passes.solvers.stages.tables import (
    Levels,
    Stages,
    cost_to_go,
    first_plans,
    least_memory_bytes,
    least_span_s,
)

__all__ = [
    "StageChoice", "StagePlan", "StageProblem", "least_memory_bytes", "least_span_s",
    "solve_stages",
]  # fmt: skip

EXACT_BITS = 52
Box = tuple[int, int, int, int]  # first and last index of the times, then of the once costs


def solve_stages(
    problem: StageProblem, n_best: int = 1, gap_goal: float = 0.0, within_rel: float = math.inf
) -> tuple[StagePlan, ...] | Infeasible:
    """The `n_best` cheapest plans, best first (fewer when there are no more).

    With `gap_goal` > 0 the search stops when no plan can be cheaper than the last of them by more
    than this (relative); 0 is exact. Plans that cost more than the cheapest by more than
    `within_rel` (relative) are left out, because proving which of those come next is most of the
    work.

    Raises `OptionError` for `n_best` < 1, a `gap_goal` outside [0, 1) or a negative `within_rel`.
    """
    if n_best < 1 or not 0 <= gap_goal < 1:
        raise OptionError(f"n_best={n_best} must be at least 1, gap_goal={gap_goal} in [0, 1)")
    if not within_rel >= 0:
        raise OptionError(f"within={within_rel} must be at least 0")
    levels = Levels.of(problem)
    longest_s = float(problem.time_s[problem.possible()].max(initial=0.0))
    scale_s = longest_s * problem.n_layers
    some = _Scaled.of(problem, levels, scale_s).leading(n_best)
    if not some:
        return too_little_memory(problem, least_memory_bytes(problem))
    dearest_s = max(problem.evaluate(stages).objective_s for stages in some)
    if len(some) == n_best:
        # A stage that alone costs more than these plans is in none of the best.
        time_s, once_s = problem.time_s[levels.stages], problem.once_s[levels.stages]
        alone_s = problem.n_microbatches * time_s + once_s
        cheap = np.flatnonzero(alone_s <= dearest_s * (1 + SAME_OPTIMUM_REL))
        levels = levels.some(cheap).without_repeats()
    search = _Search(_Scaled.of(problem, levels, dearest_s), n_best, gap_goal, within_rel)
    bound = search.run()
    bound_s = problem.evaluate(search.best[0][2]).objective_s
    if bound < search.best[0][0]:
        bound_s = bound * search.scaled.quantum_s
    kept = (stages for cost, _, stages in search.best if cost <= search.cutoff())
    return tuple(problem.evaluate(stages, bound_s) for stages in kept)


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A problem in whole numbers of `quantum_s`, as floats that hold them exactly. Arrays are
    [stages] of `levels`.

    `weight` is time * `unit` + 1, so that sums of weights rank by the sum of times, then by the
    number of stages.
    """

    problem: StageProblem
    levels: Levels
    quantum_s: float
    time: FloatArray
    once: FloatArray
    weight: FloatArray

    @staticmethod
    def of(problem: StageProblem, levels: Levels, scale_s: float) -> _Scaled:
        """The problem scaled so that sums up to `scale_s` are exact."""
        unit = problem.n_layers + 1
        # A power of two, so that division by it is exact.
        exponent = math.frexp(scale_s)[1] - (EXACT_BITS - unit.bit_length())
        quantum_s = math.ldexp(1.0, exponent)
        time = np.rint(problem.time_s[levels.stages] / quantum_s)
        once = np.rint(problem.once_s[levels.stages] / quantum_s)
        return _Scaled(problem, levels, quantum_s, time, once, time * unit + 1)

    def leading(self, n_best: int, t: float = math.inf, o: float = math.inf) -> list[Stages]:
        """The first plans by (sum, number of stages, stages) within the limits `t` and `o`."""
        within = np.flatnonzero((self.time <= t) & (self.once <= o))
        levels, weight = self.levels.some(within), self.weight[within]
        return first_plans(levels, weight, cost_to_go(levels, weight), n_best)

    def costs(self, stages: Stages) -> _Costs:
        """The costs of a plan, in quanta."""
        times = [round(float(self.problem.time_s[s]) / self.quantum_s) for s in stages]
        onces = [round(float(self.problem.once_s[s]) / self.quantum_s) for s in stages]
        return _Costs(sum(times), max(times), max(onces))


class _Costs(NamedTuple):
    """The sum and the largest of a plan's stage times, and its largest once-per-step cost."""

    sum: int
    slowest: int
    once: int


class _Search:
    """Branch and bound over boxes of limits; `best` holds (objective, n_stages, stages)."""

    def __init__(self, scaled: _Scaled, n_best: int, gap_goal: float, within_rel: float) -> None:
        self.scaled = scaled
        self.n_best = n_best
        self.gap_goal = gap_goal
        self.within_rel = within_rel
        self.n_repeats = scaled.problem.n_microbatches - 1
        # With one microbatch the slowest stage costs nothing extra: only the largest limit is used.
        self.times = _distinct(scaled.time)[0 if self.n_repeats else -1 :]
        self.onces = _distinct(scaled.once)
        self.best: list[tuple[int, int, Stages]] = []
        self.n_opened = 0

    def run(self) -> int:
        """Fill `best`; returns a lower bound on every plan."""
        heap: list[tuple[int, Box]] = [(0, (0, len(self.times) - 1, 0, len(self.onces) - 1))]
        while heap:
            bound, box = heapq.heappop(heap)
            if bound > self.cutoff() * (1 - self.gap_goal):
                return min(bound, self.best[0][0])
            self.n_opened += 1
            plans = self.scaled.leading(self.n_best, self.times[box[1]], self.onces[box[3]])
            costs = [self.scaled.costs(stages) for stages in plans]
            for stages, of_plan in zip(plans, costs, strict=True):
                self._offer(stages, of_plan)
            if len(plans) < self.n_best:
                continue  # There are no other plans within these limits.
            least = costs[0].sum
            for rest in self._remainders(box, costs):
                for part in self._halves(least, rest):
                    heapq.heappush(heap, (self._bound(least, part), part))
        return self.best[0][0]

    def _bound(self, least: int, box: Box) -> int:
        """Lower bound on the plans of a box whose least sum of times is `least`."""
        return least + self.n_repeats * self.times[box[0]] + self.onces[box[2]]

    def cutoff(self) -> float:
        """Plans that cost more than this are not among the plans returned."""
        worst = self.best[-1][0] if len(self.best) == self.n_best else math.inf
        if self.best and math.isfinite(self.within_rel):
            return min(worst, self.best[0][0] * (1 + self.within_rel))
        return worst

    def _offer(self, stages: Stages, costs: _Costs) -> None:
        objective = costs.sum + self.n_repeats * costs.slowest + costs.once
        entry = (objective, len(stages), stages)
        if entry not in self.best:
            insort(self.best, entry)
            del self.best[self.n_best :]

    def _remainders(self, box: Box, plans: list[_Costs]) -> Iterator[Box]:
        """The parts of the box that may hold a plan ranked before all of `plans`, the best at its
        corner.

        A plan comes after each of `plans` if its slowest stage is no faster than the slowest of
        theirs, and its once cost no lower than the largest of theirs.
        """
        t_lo, t_hi, o_lo, o_hi = box
        slowest = max(plan.slowest for plan in plans)
        once = max(plan.once for plan in plans)
        t = bisect_left(self.times, slowest, t_lo, t_hi + 1)
        o = bisect_left(self.onces, once, o_lo, o_hi + 1)
        if t > t_lo:
            yield t_lo, t - 1, o_lo, o_hi
        if t <= t_hi and o > o_lo:
            yield t, t_hi, o_lo, o - 1

    def _halves(self, least: int, box: Box) -> Iterator[Box]:
        """The box without what its bound rules out, halved along the side on which its bound varies
        more."""
        t_lo, t_hi, o_lo, o_hi = box
        room = self.cutoff() - self._bound(least, box)
        if room < 0:
            return
        if self.n_repeats:
            t_hi = bisect_right(
                self.times, self.times[t_lo] + room / self.n_repeats, t_lo, t_hi + 1
            )
            t_hi -= 1
        o_hi = bisect_right(self.onces, self.onces[o_lo] + room, o_lo, o_hi + 1) - 1
        t_range = self.n_repeats * (self.times[t_hi] - self.times[t_lo])
        o_range = self.onces[o_hi] - self.onces[o_lo]
        if t_range == o_range == 0:
            yield t_lo, t_hi, o_lo, o_hi
        elif t_range >= o_range:
            middle = (t_lo + t_hi) // 2
            yield t_lo, middle, o_lo, o_hi
            yield middle + 1, t_hi, o_lo, o_hi
        else:
            middle = (o_lo + o_hi) // 2
            yield t_lo, t_hi, o_lo, middle
            yield t_lo, t_hi, middle + 1, o_hi


def _distinct(values: FloatArray) -> list[int]:
    """The distinct values, ascending."""
    return [int(v) for v in np.unique(values)]
