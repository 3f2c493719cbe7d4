"""The least span of what is left, for every layer, number of devices and number of stages.

Stages are counted from the end: at level j, j stages come after one. With stage i holding layers
k..l, n_i devices, and d devices left (`cost_to_go`):

    g(j, k, d) = min over i that begin at k of  added_i + g(j-1, l+1, d - n_i)
    f(j, k, d) = min over i that begin at k of  max(work_i, drained_i + 2 g, added_i + f)
    f(-1, L, 0) = g(-1, L, 0) = 0         i may begin with d devices left (`StageProblem.may_begin`)

where f and g on the right are those of what is left, as in the first line. g is the least that
stages add. A plan may not have both at once, so f is a lower bound with 1F1B, and exact without.

The last level stands for all above it, so a stage there is followed by one there or at the level
below (`levels_after`). When the number of stages is given, each level is one number, and plans
begin at the last.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.passes.solvers.problem import compiled
from autopar.passes.solvers.stages.problem import StageProblem


class CostToGo:
    """f and g of the module docstring: `table` and `added` are [first layer, devices, level + 1],
    and 0 there is the end of the pipeline. Infinite where there is no plan. Devices are counted in
    `unit`, the largest that divides all stages: no other number is ever left.
    """

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.sizes = np.array(problem.config_devices)
        used = np.unique(problem.config[np.isfinite(problem.work_s[:, 0])])
        self.unit = math.gcd(problem.n_devices, *self.sizes[used].tolist())
        lefts = range(0, problem.n_devices + 1, self.unit)
        self.sizes = self.sizes // self.unit
        self.begins = np.array(
            [[problem.may_begin(c, n) for n in lefts] for c in range(len(self.sizes))]
        )
        self.table, self.added = _recurrence(
            problem.work_s, problem.added_s, problem.drained_s,
            problem.last, problem.config, problem.starts, self.sizes, self.begins, problem.is_exact,
        )  # fmt: skip

    @property
    def first_levels(self) -> range:
        """The possible levels of a plan's first stage."""
        n_levels = self.problem.n_levels
        return range(n_levels - 1 if self.problem.is_exact else 0, n_levels)

    def levels_after(self, level: int) -> tuple[int, ...]:
        """The possible levels of the stage after one at `level`; -1: none comes."""
        is_last = level == self.problem.n_levels - 1 and not self.problem.is_exact
        return (level - 1, level) if is_last else (level - 1,)

    @property
    def least_s(self) -> float:
        """Lower bound on the span of all plans."""
        return float(self.table[0, -1, [level + 1 for level in self.first_levels]].min())


def least_span_s(problem: StageProblem) -> float:
    """Lower bound on the step of every plan; infinite: there is none."""
    return CostToGo(problem).least_s


@compiled
def _recurrence(
    work: Array, added: Array, drained: Array, lasts: Indices, configs: Indices,
    starts: Indices, sizes: Indices, begins: BoolArray, is_exact: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """f and g; `sizes` are [configurations], `begins` [configurations, devices]."""
    n_layers, n_devices, n_levels = len(starts) - 1, begins.shape[1] - 1, work.shape[1]
    # 0: f, 1: g. follow[..., j]: the least of what comes after a stage at level j.
    out = np.full((2, n_layers + 1, n_devices + 1, n_levels + 1), np.inf)
    follow = np.full((2, n_layers + 1, n_devices + 1, n_levels), np.inf)
    out[:, n_layers, 0, 0] = 0.0
    follow[:, n_layers, 0, 0] = 0.0
    for first in range(n_layers - 1, -1, -1):
        start = starts[first]
        while start < starts[first + 1]:
            last, stop = lasts[start], start
            while stop < starts[first + 1] and lasts[stop] == last:
                stop += 1
            top = min(n_levels, n_layers - last)  # a stage has at least one layer
            for i in range(start, stop):
                if _is_dominated(work, added, configs, sizes, start, stop, i, top):
                    continue
                size = sizes[configs[i]]
                for devices in range(size, n_devices + 1):
                    if begins[configs[i], devices]:
                        for j in range(top):
                            rest = follow[0, last + 1, devices - size, j]
                            after = follow[1, last + 1, devices - size, j]
                            if rest == np.inf or work[i, j] == np.inf:
                                continue
                            own = max(work[i, j], drained[i, j] + 2.0 * after)
                            at = out[:, first, devices, j + 1]
                            at[0] = min(at[0], max(own, added[i, j] + rest))
                            at[1] = min(at[1], added[i, j] + after)
            start = stop
        for devices in range(n_devices + 1):
            for k in range(2):
                at = out[k, first, devices]
                follow[k, first, devices] = at[:n_levels]
                if not is_exact:
                    follow[k, first, devices, n_levels - 1] = min(at[n_levels - 1], at[n_levels])
    return out[0], out[1]


@compiled
def _is_dominated(
    work: Array, added: Array, configs: Indices, sizes: Indices, start: int, stop: int,
    i: int, n_levels: int,
) -> bool:  # fmt: skip
    """Is another stage of these as good as stage i at every level? Of equal ones, the first is."""
    if not work[i, 0] < np.inf:
        return True
    for k in range(start, stop):
        if k == i or sizes[configs[k]] != sizes[configs[i]]:
            continue
        is_worse, is_better = False, k < i
        for j in range(n_levels):
            is_worse |= work[k, j] > work[i, j] or added[k, j] > added[i, j]
            is_better |= work[k, j] < work[i, j] or added[k, j] < added[i, j]
        if is_better and not is_worse:
            return True
    return False
