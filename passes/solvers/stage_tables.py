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

import numpy as np
from numpy.typing import NDArray

from autopar.compiled import compiled
from autopar.passes.solvers.problem import BoolArray, FloatArray
from autopar.passes.solvers.stage_problem import StageChoice, StageProblem

Stages = tuple[StageChoice, ...]
IntArray = NDArray[np.int64]
CountArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Levels:
    """At which levels a stage may be, and which configurations may begin where.

    `n_fitting[first, last, config]`: a stage may be at levels 1 to that, at none if it is 0. The
    last of `n_levels` stands for all above it; if `exact`, plans have as many stages as levels.
    Configurations of as many devices that may begin alike are one kind: `kinds[config]` is its
    number, `sizes[kind]` its devices, and `begins[kind, d]`: may it begin when d devices are left?
    """

    n_fitting: CountArray
    n_levels: int
    exact: bool
    kinds: IntArray
    sizes: IntArray
    begins: BoolArray

    @staticmethod
    def of(problem: StageProblem) -> Levels:
        """The levels of a problem, and which stages fit at each."""
        levels = Levels.unlimited(problem)
        if problem.memory_bytes is None:
            return levels.without_repeats()
        n_fitting, left = np.zeros_like(levels.n_fitting), np.nonzero(levels.n_fitting)
        for n_after in range(levels.n_levels):
            fits = problem.stage_bytes(n_after, left) <= problem.limit_bytes
            left = tuple(at[fits] for at in left)
            n_fitting[left] += 1
        return replace(levels, n_fitting=n_fitting).without_repeats()

    @staticmethod
    def unlimited(problem: StageProblem) -> Levels:
        """All levels as if everything fitted."""
        n_levels = problem.n_stages or max(1, min(problem.max_stages, problem.n_microbatches))
        found: dict[object, int] = {}
        every = [(n, problem.offsets(c)) for c, n in enumerate(problem.config_devices)]
        kinds = [found.setdefault(kind, len(found)) for kind in every]
        firsts = [kinds.index(kind) for kind in range(len(found))]
        lefts = range(problem.n_devices + 1)
        return Levels(
            problem.possible() * np.int32(n_levels),
            n_levels,
            problem.n_stages is not None,
            np.array(kinds),
            np.array([problem.config_devices[c] for c in firsts]),
            np.array([[problem.may_begin(c, d) for d in lefts] for c in firsts]),
        )

    @property
    def n_devices(self) -> int:
        return self.begins.shape[1] - 1

    def within(self, allowed: BoolArray) -> Levels:
        """Those of the stages that are `allowed`, [first, last, config]."""
        return replace(self, n_fitting=self.n_fitting * allowed)

    def without_repeats(self) -> Levels:
        """With one level for all above the last where anything changes."""
        if self.exact:
            return self
        changing = self.n_fitting * (self.n_fitting < self.n_levels)
        n_levels = int(changing.max()) + 1
        return replace(self, n_fitting=np.minimum(self.n_fitting, n_levels), n_levels=n_levels)

    @property
    def first_levels(self) -> range:
        """The levels that a plan may begin at."""
        return range(self.n_levels if self.exact else 1, self.n_levels + 1)

    def after(self, level: int) -> tuple[int, ...]:
        """The levels that a stage at `level` may be followed by."""
        ends_itself = level == self.n_levels and not self.exact
        return (level - 1, level) if ends_itself else (level - 1,)


def cost_to_go(levels: Levels, cost: FloatArray) -> FloatArray:
    """f of the module docstring, [first layer, devices, level]; infinite where nothing fits.

    `cost` is [first, last, config].
    """
    least = _least_by_kind(levels.n_fitting, cost, levels.kinds, len(levels.sizes), levels.n_levels)
    return _recurrence(least, levels.sizes, levels.begins, levels.exact, False)


def least_memory_bytes(problem: StageProblem) -> float:
    """The least memory per device with which some plan fits; infinite: none ever does."""
    levels, possible = Levels.unlimited(problem), problem.possible().astype(np.int32)
    sizes = (problem.stage_bytes(n_after) for n_after in range(levels.n_levels))
    n_kinds = len(levels.sizes)
    least = [_least_by_kind(possible, size, levels.kinds, n_kinds, 1) for size in sizes]
    table = _recurrence(
        np.concatenate(least, axis=-1), levels.sizes, levels.begins, levels.exact, True
    )
    return least_total(levels, table)


@compiled
def _least_by_kind(
    n_fitting: CountArray, cost: FloatArray, kinds: IntArray, n_kinds: int, n_levels: int
) -> FloatArray:
    """The least cost, [kind, first, last, level - 1], of the stages of a kind that fit at a level.

    `n_fitting` and `cost` are [first, last, config].
    """
    n_layers, _, n_configs = cost.shape
    least = np.full((n_kinds, n_layers, n_layers, n_levels), np.inf)
    for first in range(n_layers):
        for last in range(first, n_layers):
            for config in range(n_configs):
                here, paid = least[kinds[config], first, last], cost[first, last, config]
                for j in range(n_fitting[first, last, config]):
                    here[j] = min(here[j], paid)
    return least


@compiled
def _recurrence(
    least: FloatArray, sizes: IntArray, begins: BoolArray, exact: bool, largest: bool
) -> FloatArray:
    """`cost_to_go` of `_least_by_kind`; if `largest`, the least maximum instead of the least sum.

    `sizes[kind]` and `begins[kind, devices]` are those of `Levels`.
    """
    n_kinds, n_layers, _, n_levels = least.shape
    n_devices = begins.shape[1] - 1
    out = np.full((n_layers + 1, n_devices + 1, n_levels + 1), np.inf)
    out[n_layers, 0, 0] = 0.0
    # follow[..., j - 1]: what comes after a stage at level j.
    follow = np.full((n_layers + 1, n_devices + 1, n_levels), np.inf)
    follow[n_layers, 0, 0] = 0.0
    for first in range(n_layers - 1, -1, -1):
        for kind in range(n_kinds):
            for last in range(first, n_layers):
                paid = least[kind, first, last]
                top = min(n_levels, n_layers - last)  # a stage has at least one layer
                while top > 0 and paid[top - 1] == np.inf:
                    top -= 1
                if top == 0:
                    continue
                for devices in range(sizes[kind], n_devices + 1):
                    if begins[kind, devices]:
                        rest = follow[last + 1, devices - sizes[kind]]
                        here = out[first, devices]
                        for j in range(top):
                            both = max(paid[j], rest[j]) if largest else paid[j] + rest[j]
                            here[j + 1] = min(here[j + 1], both)
        for devices in range(n_devices + 1):
            here, after = out[first, devices], follow[first, devices]
            for j in range(n_levels):
                after[j] = here[j]
            if not exact:
                after[n_levels - 1] = min(after[n_levels - 1], here[n_levels])
    return out


def least_total(levels: Levels, table: FloatArray) -> float:
    """The optimum of a table made by `cost_to_go`, over all numbers of stages allowed."""
    return float(table[0, -1, levels.first_levels].min())


def first_plans(levels: Levels, cost: FloatArray, table: FloatArray, n_best: int) -> list[Stages]:
    """The first `n_best` plans (fewer if there are no more) by (total cost, stages).

    `table` is `cost_to_go(levels, cost)`; sums of `cost` must be exact, as of whole numbers.
    """
    n_layers, _, n_configs = cost.shape
    heap: list[tuple[float, Stages, int, int, int, float]] = []
    for level in levels.first_levels:
        total = float(table[0, -1, level])
        if np.isfinite(total):
            heapq.heappush(heap, (total, (), level, 0, levels.n_devices, 0.0))
    plans: list[Stages] = []
    while heap and len(plans) < n_best:
        _, stages, level, k, devices, spent = heapq.heappop(heap)
        if k == n_layers:
            plans.append(stages)
            continue
        fits, paid = levels.n_fitting[k, k:] >= level, spent + cost[k, k:]
        for after in levels.after(level):
            left = np.maximum(devices - levels.sizes, 0)
            begins = levels.begins[:, devices, None]
            rest = np.where(begins, table[k + 1 :, left, after].T, np.inf)
            # Whatever comes later is preceded by n_best plans from here alone.
            totals, places = _first_by_cost(fits, paid, rest, levels.kinds, n_best)
            for total, at in zip(totals.tolist(), places.tolist(), strict=True):
                if np.isfinite(total):
                    i, c = divmod(at, n_configs)
                    longer = (*stages, StageChoice(k, k + i, c))
                    left_after = devices - int(levels.sizes[levels.kinds[c]])
                    entry = (total, longer, after, k + i + 1, left_after, float(paid[i, c]))
                    heapq.heappush(heap, entry)
    return plans


@compiled
def _first_by_cost(
    fits: BoolArray, paid: FloatArray, rest: FloatArray, kinds: IntArray, n_best: int
) -> tuple[FloatArray, IntArray]:
    """The least `n_best` of paid[last, config] + rest[kind, last] where it fits, and their places
    in [last, config], flat; equal ones in that order. Infinite where there are fewer."""
    n_lasts, n_configs = paid.shape
    totals, places = np.full(n_best, np.inf), np.zeros(n_best, dtype=np.int64)
    for last in range(n_lasts):
        for config in range(n_configs):
            total = paid[last, config] + rest[kinds[config], last]
            if fits[last, config] and total < totals[-1]:
                at = n_best - 1
                while at > 0 and total < totals[at - 1]:
                    totals[at], places[at] = totals[at - 1], places[at - 1]
                    at -= 1
                totals[at], places[at] = total, last * n_configs + config
    return totals, places
