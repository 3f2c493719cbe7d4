"""The stage recurrence for one limit on stage times, and the plans read off it in order.

Stages are counted from the end, because the microbatches in flight on a stage depend only on
how many stages follow it. With level j = 1 for the last stage, layers k..i in a stage of
configuration c with n_c devices, and d devices left (`cost_to_go`):

    f(j, k, d) = min over i >= k, c allowed at level j of  w(k, i, c) + f(j-1, i+1, d - n_c)
    f(0, L, 0) = 0                 c may begin with d devices left (`StageProblem.may_begin`)

What fits at a level fits at every lower one. Above the last level J where anything changes (at
most the number of microbatches), levels are one: a stage at J is followed by J or J-1
(`follow`). Without a memory limit J is 1, and the recurrence is that of the sum alone. When the
number of stages is given, J is that number, no level follows itself, and plans begin at J.

`first_plans` walks the table from the front, best first: f is the exact cost of the rest, so
plans leave the heap by (sum of w, stages in lexicographic order), and each costs one walk.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.problem import BoolArray, FloatArray
from autopar.passes.solvers.stage_problem import StageChoice, StageProblem

Stages = tuple[StageChoice, ...]
Index = NDArray[np.intp] | slice


@dataclass(frozen=True, eq=False)
class Levels:
    """Which [first, last, config] may be a stage at each level: [level - 1, first, last, config].

    The last level stands for all above it; if `exact`, plans have as many stages as levels.
    `kinds` are configurations of as many devices that may begin alike; `fits[c][d]`: may a stage of
    configuration c begin when d devices are left?
    """

    allowed: BoolArray
    config_devices: tuple[int, ...]
    n_devices: int
    exact: bool
    fits: BoolArray
    kinds: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(problem: StageProblem, possible: BoolArray) -> Levels:
        """The levels of a problem of which only the `possible` stages matter."""
        fits = [possible] * (problem.n_stages or 1)
        if problem.memory_bytes is not None:
            sizes = (problem.stage_bytes(n_after) for n_after in range(_n_levels(problem)))
            fits = [possible & (size <= problem.limit_bytes) for size in sizes]
        while problem.n_stages is None and len(fits) > 1 and np.array_equal(fits[-1], fits[-2]):
            fits.pop()
        return Levels._made(problem, np.array(fits))

    @staticmethod
    def unlimited(problem: StageProblem) -> tuple[Levels, FloatArray]:
        """All levels as if everything fitted, and the bytes at each: [level - 1, ...]."""
        allowed = np.repeat(problem.possible()[None], _n_levels(problem), axis=0)
        sizes = np.array([problem.stage_bytes(n) for n in range(len(allowed))])
        return Levels._made(problem, allowed), sizes

    @staticmethod
    def _made(problem: StageProblem, allowed: BoolArray) -> Levels:
        kinds: dict[object, list[int]] = {}
        for c in np.flatnonzero(allowed.any(axis=(0, 1, 2))).tolist():
            kinds.setdefault((problem.config_devices[c], problem.offsets(c)), []).append(c)
        fits = np.zeros((len(problem.config_devices), problem.n_devices + 1), dtype=bool)
        for alike in kinds.values():
            fits[alike] = [problem.may_begin(alike[0], d) for d in range(problem.n_devices + 1)]
        exact, sizes = problem.n_stages is not None, problem.config_devices
        every = tuple(map(tuple, kinds.values()))
        return Levels(allowed, sizes, problem.n_devices, exact, fits, every)

    @property
    def n_levels(self) -> int:
        return len(self.allowed)

    def within(self, allowed: BoolArray) -> Levels:
        return replace(self, allowed=self.allowed & allowed)

    @property
    def first_levels(self) -> range:
        """The levels that a plan may begin at."""
        return range(self.n_levels if self.exact else 1, self.n_levels + 1)

    def after(self, level: int) -> tuple[int, ...]:
        """The levels that a stage at `level` may be followed by."""
        ends_itself = level == self.n_levels and not self.exact
        return (level - 1, level) if ends_itself else (level - 1,)


def _n_levels(problem: StageProblem) -> int:
    if problem.n_stages is not None:
        return problem.n_stages
    return max(1, min(problem.max_stages, problem.n_microbatches))


def cost_to_go(levels: Levels, cost: FloatArray, combine: np.ufunc = np.add) -> FloatArray:
    """f of the module docstring, [level, first layer, devices]; infinite where nothing fits.

    `cost` is [first, last, config], or one such array per level. With `combine=np.maximum`, the
    least maximum instead of the least sum.
    """
    n_levels, n_layers = levels.allowed.shape[:2]
    n_devices = levels.n_devices
    by_kind = _least_by_kind(levels, cost)
    out = np.full((n_levels + 1, n_layers + 1, n_devices + 1), np.inf)
    out[0, n_layers, 0] = 0.0
    # follow[j - 1]: what comes after a stage at level j.
    follow = out[:-1].copy()
    for k in reversed(range(n_layers)):
        top = min(n_levels, n_layers - k)  # a stage has at least one layer
        for kind in by_kind:
            stop = kind.stops[k]
            if not stop:
                continue
            rest = follow[:top, k + 1 : stop + 1, kind.left]
            sums = combine(kind.least[:top, k, k:stop, None], rest).min(axis=1)
            here = out[1 : top + 1, k]
            here[:, kind.starts] = np.minimum(here[:, kind.starts], sums)
        follow[:, k] = out[:-1, k]
        if not levels.exact:
            np.minimum(follow[-1, k], out[-1, k], out=follow[-1, k])
    return out


class _Kind(NamedTuple):
    """Configurations that may begin alike: with how many devices left, how many they leave, their
    least cost [level - 1, first, last], and per first layer the end of the last that is finite."""

    starts: Index
    left: Index
    least: FloatArray
    stops: list[int]


def _least_by_kind(levels: Levels, cost: FloatArray) -> list[_Kind]:
    out = []
    for kind in levels.kinds:
        starts, same = np.flatnonzero(levels.fits[kind[0]]), list(kind)
        if len(starts):
            least = np.where(levels.allowed[..., same], cost[..., same], np.inf).min(axis=-1)
            finite = np.isfinite(least[0])
            stops = np.where(finite, np.arange(1, finite.shape[1] + 1), 0).max(axis=1).tolist()
            left = starts - levels.config_devices[kind[0]]
            out.append(_Kind(_index(starts), _index(left), least, stops))
    return out


def _index(rising: NDArray[np.intp]) -> Index:
    """As a slice, which copies nothing, where they are evenly apart."""
    steps = np.diff(rising)
    if len(steps) and (steps != steps[0]).any():
        return rising
    return slice(int(rising[0]), int(rising[-1]) + 1, int(steps[0]) if len(steps) else 1)


def least_total(levels: Levels, table: FloatArray) -> float:
    """The optimum of a table made by `cost_to_go`, over all numbers of stages allowed."""
    return float(table[levels.first_levels, 0, -1].min())


def first_plans(levels: Levels, cost: FloatArray, table: FloatArray, n_best: int) -> list[Stages]:
    """The first `n_best` plans (fewer if there are no more) by (total cost, stages).

    `table` is `cost_to_go(levels, cost)`; sums of `cost` must be exact, as of whole numbers.
    """
    n_layers = levels.allowed.shape[1]
    heap: list[tuple[float, Stages, int, int, int, float]] = []
    for level in levels.first_levels:
        total = float(table[level, 0, levels.n_devices])
        if np.isfinite(total):
            heapq.heappush(heap, (total, (), level, 0, levels.n_devices, 0.0))
    plans: list[Stages] = []
    while heap and len(plans) < n_best:
        _, stages, level, k, devices, spent = heapq.heappop(heap)
        if k == n_layers:
            plans.append(stages)
            continue
        paid = spent + np.where(levels.allowed[level - 1, k, k:], cost[k, k:], np.inf)
        for after in levels.after(level):
            totals = paid + _rest(table[after, k + 1 :], levels, devices)
            flat = totals.ravel()
            # Whatever comes later is preceded by n_best plans from here alone.
            for at in np.argsort(flat, kind="stable")[:n_best]:
                if not np.isfinite(flat[at]):
                    break
                i, c = (int(x) for x in np.unravel_index(at, totals.shape))
                longer = (*stages, StageChoice(k, k + i, c))
                left = devices - levels.config_devices[c]
                entry = (float(flat[at]), longer, after, k + i + 1, left, float(paid[i, c]))
                heapq.heappush(heap, entry)
    return plans


def _rest(after: FloatArray, levels: Levels, devices: int) -> FloatArray:
    """[last layer, config]: the cost of what follows when each configuration took its devices."""
    left = devices - np.array(levels.config_devices)
    return np.where(levels.fits[:, devices], after[:, np.maximum(left, 0)], np.inf)
