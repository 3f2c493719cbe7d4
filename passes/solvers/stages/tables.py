"""The stage recurrence for one limit on stage times, and the plans read off it in order.

Stages are counted from the end: the microbatches in flight on a stage depend only on how many
stages follow it. With level j = 1 for the last stage, layers k..i in a stage of configuration c
with n_c devices, and d devices left (`cost_to_go`):

    f(j, k, d) = min over i >= k, c allowed at level j of  w(k, i, c) + f(j-1, i+1, d - n_c)
    f(0, L, 0) = 0                 c may begin with d devices left (`StageProblem.may_begin`)

What fits at a level fits at every lower one. All levels above the last one where anything changes
(at most the number of microbatches) are merged into one, J (`Levels.without_repeats`). A stage at J
is followed by one at J or J-1 (`Levels.after`). Without a memory limit J is 1, and the recurrence
is that of the sum alone. When the number of stages is given, J is that number, no level follows
itself, and plans begin at J.

`first_plans` walks the table from the front, best first. f is the exact cost of the rest, so plans
leave the heap in the order of (sum of w, stages), and each costs one walk.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.problem import BoolArray, FloatArray, compiled
from autopar.passes.solvers.stages.problem import StageChoice, StageProblem

Stages = tuple[StageChoice, ...]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Levels:
    """The stages that fit at some level, and where each may be.

    `first`, `last`, `config` and `n_fitting` are [stages], ordered by the first three. A stage may
    be at levels 1 to `n_fitting`. The last of `n_levels` stands for all above it. With `exact`,
    plans have as many stages as levels. Configurations that have as many devices and may begin at
    the same places are of one kind: `kinds[config]` is its number, `sizes[kind]` its devices, and
    `begins[kind, d]` whether it may begin with d devices left. Devices are counted in a common unit
    (`some`).
    """

    first: IntArray
    last: IntArray
    config: IntArray
    n_fitting: IntArray
    n_layers: int
    n_levels: int
    exact: bool
    kinds: IntArray
    sizes: IntArray
    begins: BoolArray

    @staticmethod
    def of(problem: StageProblem) -> Levels:
        """The levels of a problem, and which stages fit at each."""
        levels = Levels.unlimited(problem)
        if math.isfinite(problem.limit_bytes):
            at = levels.stages
            n_fitting = _n_fitting(
                problem.static_bytes[at], problem.activation_bytes[at], problem.limit_bytes,
                problem.n_microbatches, levels.n_levels,
            )  # fmt: skip
            levels = replace(levels, n_fitting=n_fitting).some(np.flatnonzero(n_fitting))
        return levels.without_repeats()

    @staticmethod
    def unlimited(problem: StageProblem) -> Levels:
        """All stages at all levels, as if everything fitted."""
        n_levels = problem.n_levels
        found: dict[object, int] = {}
        every = [(n, problem.offsets(c)) for c, n in enumerate(problem.config_devices)]
        kinds = [found.setdefault(kind, len(found)) for kind in every]
        firsts = [kinds.index(kind) for kind in range(len(found))]
        lefts = range(problem.n_devices + 1)
        # Contiguous, not views of one array: numba compiles a function for each memory layout.
        first, last, config = map(np.ascontiguousarray, np.nonzero(problem.possible()))
        return Levels(
            first,
            last,
            config,
            np.full(len(first), n_levels),
            problem.n_layers,
            n_levels,
            problem.n_stages is not None,
            np.array(kinds),
            np.array([problem.config_devices[c] for c in firsts]),
            np.array([[problem.may_begin(c, d) for d in lefts] for c in firsts]),
        )

    @property
    def stages(self) -> tuple[IntArray, IntArray, IntArray]:
        """Their indices in arrays [first, last, config]."""
        return self.first, self.last, self.config

    @property
    def n_devices(self) -> int:
        return self.begins.shape[1] - 1

    def some(self, at: IntArray) -> Levels:
        """Some of the stages, in order. Devices are counted in the largest unit that divides those
        of all of them: no other number is ever left."""
        first, last, config, n_fitting = (
            array[at] for array in (self.first, self.last, self.config, self.n_fitting)
        )
        unit = math.gcd(self.n_devices, *self.sizes[np.unique(self.kinds[config])].tolist())
        return replace(
            self, first=first, last=last, config=config, n_fitting=n_fitting,
            sizes=self.sizes // unit, begins=np.ascontiguousarray(self.begins[:, ::unit]),
        )  # fmt: skip

    def without_repeats(self) -> Levels:
        """The same with one level for all above the last where anything changes."""
        if self.exact:
            return self
        changing = self.n_fitting[self.n_fitting < self.n_levels]
        n_levels = int(changing.max(initial=0)) + 1
        return replace(self, n_fitting=np.minimum(self.n_fitting, n_levels), n_levels=n_levels)

    @cached_property
    def starts(self) -> IntArray:
        """[first layer]: the index of the first stage that begins there; then the end."""
        return np.searchsorted(self.first, np.arange(self.n_layers + 1))

    @property
    def first_levels(self) -> range:
        """The possible levels of a plan's first stage."""
        return range(self.n_levels if self.exact else 1, self.n_levels + 1)

    def after(self, level: int) -> tuple[int, ...]:
        """The possible levels of the stage after one at `level`."""
        ends_itself = level == self.n_levels and not self.exact
        return (level - 1, level) if ends_itself else (level - 1,)


def cost_to_go(levels: Levels, cost: FloatArray) -> FloatArray:
    """f of the module docstring, [first layer, devices, level]; infinite where nothing fits.

    `cost` is [stages].
    """
    return _table(levels, cost[:, None], cost[:, None])


def least_memory_bytes(problem: StageProblem) -> float:
    """The least memory per device with which some plan fits; infinite: none ever does."""
    levels = Levels.unlimited(problem)
    after = np.arange(levels.n_levels)
    size = problem.stage_bytes(after, tuple(at[:, None] for at in levels.stages))
    return least_total(levels, _table(levels, size, np.zeros_like(size)))


def least_span_s(problem: StageProblem, own_s: FloatArray | None = None) -> float:
    """Lower bound on the time of a step, whatever the schedule.

    The first microbatch passes every stage before s, then s works on B microbatches, then the
    gradient of the last one passes back. The bound is the least, over all plans, of

        max_s  (sum of time_r over r < s)  +  own_s

    `own_s` is what a stage takes at least in a step, [first, last, config, number of stages after
    it]; B time_s if not given.
    It is at most the closed form of `problem.py`. Schedules undercut that form: stages after a slow
    one work on the last microbatch while the slow one is still busy with the one before. Infinite:
    there is no plan.
    """
    levels = Levels.of(problem) if own_s is None else Levels.unlimited(problem)
    time_s = problem.time_s[levels.stages][:, None]
    if own_s is None:
        return least_total(levels, _table(levels, problem.n_microbatches * time_s, time_s))
    own_s = np.ascontiguousarray(own_s[levels.stages])
    return least_total(levels, _table(levels, own_s, np.repeat(time_s, own_s.shape[1], axis=1)))


def _table(levels: Levels, own: FloatArray, added: FloatArray) -> FloatArray:
    return _recurrence(
        own, added, levels.last, levels.kinds[levels.config], levels.n_fitting, levels.starts,
        levels.sizes, levels.begins, levels.n_levels, levels.exact,
    )  # fmt: skip


@compiled
def _n_fitting(
    static_bytes: FloatArray,
    activation_bytes: FloatArray,
    limit_bytes: float,
    n_microbatches: int,
    n_levels: int,
) -> IntArray:
    """[stages]: at how many levels each fits. Its bytes (`StageProblem.stage_bytes`) rise with the
    level."""
    out = np.zeros(len(static_bytes), dtype=np.int64)
    for i in range(len(out)):
        low, high = 0, n_levels
        while low < high:
            level = (low + high + 1) // 2
            n_in_flight = min(n_microbatches, level)
            if static_bytes[i] + n_in_flight * activation_bytes[i] <= limit_bytes:
                low = level
            else:
                high = level - 1
        out[i] = low
    return out


@compiled
def _recurrence(
    own: FloatArray, added: FloatArray, lasts: IntArray, kinds: IntArray, n_fitting: IntArray,
    starts: IntArray, sizes: IntArray, begins: BoolArray, n_levels: int, exact: bool,
) -> FloatArray:  # fmt: skip
    """[first layer, devices, level]: the least total of stages, where one stage and what follows it
    total max(own, added + rest). With `added` = `own` that is the sum, with 0 the maximum.

    `own` and `added` are [stages, levels], or [stages, 1] for all levels; `lasts`, `kinds` and
    `n_fitting` are [stages]; the others are those of `Levels`. Of configurations with equally many
    devices each takes the least.
    """
    n_layers, n_kinds, n_devices = len(starts) - 1, len(sizes), begins.shape[1] - 1
    out = np.full((n_layers + 1, n_devices + 1, n_levels + 1), np.inf)
    out[n_layers, 0, 0] = 0.0
    # follow[..., j - 1]: the least total of what comes after a stage at level j.
    follow = np.full((n_layers + 1, n_devices + 1, n_levels), np.inf)
    follow[n_layers, 0, 0] = 0.0
    # may_begin[kind, : n_begins[kind]]: the numbers of devices left with which it may begin.
    may_begin, n_begins = np.zeros(begins.shape, dtype=np.int64), np.zeros(n_kinds, dtype=np.int64)
    for kind in range(n_kinds):
        for devices in range(sizes[kind], n_devices + 1):
            if begins[kind, devices]:
                may_begin[kind, n_begins[kind]] = devices
                n_begins[kind] += 1
    for first in range(n_layers - 1, -1, -1):
        start = starts[first]
        while start < starts[first + 1]:
            last = lasts[start]
            top = min(n_levels, n_layers - last)  # a stage has at least one layer
            least = np.full((2, n_kinds, top), np.inf)
            while start < starts[first + 1] and lasts[start] == last:
                kind = kinds[start]
                for j in range(min(top, n_fitting[start])):
                    at = min(j, own.shape[1] - 1)
                    least[0, kind, j] = min(least[0, kind, j], own[start, at])
                    least[1, kind, j] = min(least[1, kind, j], added[start, at])
                start += 1
            for kind in range(n_kinds):
                if least[0, kind, 0] < np.inf:
                    for devices in may_begin[kind, : n_begins[kind]]:
                        left = devices - sizes[kind]
                        for j in range(top):
                            rest = follow[last + 1, left, j]
                            both = max(least[0, kind, j], least[1, kind, j] + rest)
                            out[first, devices, j + 1] = min(out[first, devices, j + 1], both)
        for devices in range(n_devices + 1):
            for j in range(n_levels):
                follow[first, devices, j] = out[first, devices, j]
            if not exact:
                ends = min(out[first, devices, n_levels - 1], out[first, devices, n_levels])
                follow[first, devices, n_levels - 1] = ends
    return out


def least_total(levels: Levels, table: FloatArray) -> float:
    """The optimum of a table like that of `cost_to_go`, over all allowed numbers of stages."""
    return float(table[0, -1, levels.first_levels].min())


def first_plans(levels: Levels, cost: FloatArray, table: FloatArray, n_best: int) -> list[Stages]:
    """The first `n_best` plans (fewer if there are no more) by (total cost, stages).

    `table` is `cost_to_go(levels, cost)`. Sums of `cost` must be exact, as those of whole numbers
    are.
    """
    n_layers = levels.n_layers
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
        start, end = levels.starts[k : k + 2].tolist()
        last, config = levels.last[start:end], levels.config[start:end]
        kinds, paid = levels.kinds[config], spent + cost[start:end]
        fits = (levels.n_fitting[start:end] >= level) & levels.begins[kinds, devices]
        left = np.maximum(devices - levels.sizes, 0)[kinds]
        for after in levels.after(level):
            totals = np.where(fits, paid + table[last + 1, left, after], np.inf)
            # The others are preceded by n_best plans from here alone.
            at = _least(totals, n_best)
            columns = (array[at].tolist() for array in (totals, last, config, left, paid))
            for total, i, c, left_after, spent_after in zip(*columns, strict=True):
                longer = (*stages, StageChoice(k, i, c))
                entry = (total, longer, after, i + 1, left_after, spent_after)
                heapq.heappush(heap, entry)
    return plans


@compiled
def _least(totals: FloatArray, n_best: int) -> IntArray:
    """The indices of the least `n_best` finite numbers, ascending. Of equal numbers the first comes
    first."""
    out, n_found = np.zeros(n_best + 1, dtype=np.int64), 0
    for i in range(len(totals)):
        if totals[i] < np.inf and (n_found < n_best or totals[i] < totals[out[n_best - 1]]):
            at = n_found
            while at > 0 and totals[i] < totals[out[at - 1]]:
                out[at] = out[at - 1]
                at -= 1
            out[at] = i
            n_found = min(n_found + 1, n_best)
    return out[:n_found]
