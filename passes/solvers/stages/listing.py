"""Plans in the order of their spans, read off the recurrence (`recurrence.py`).

A plan is extended stage by stage from the front. Its least span is

    max(span of its stages so far, their `added` + f of what is left)

where the span so far takes g of what is left for the later stages. Neither is above what any plan
takes that begins so, and a complete plan's is its span. So complete plans leave the heap best first
(A*, Hart et al., 1968). Of equal spans, the plan with more layers placed comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autopar.passes.solvers.stages.recurrence import CostToGo


class _PartialPlan(NamedTuple):
    """The first stages of a plan, in the order in which they are extended.

    least_s    of all plans that begin so
    n_left     layers
    before_s   what the stages add together
    stages     their indices
    span_s     of these stages, without what comes after them
    waits_s    the most that they take without twice the others: before, drained, less twice both
    level      of the next stage
    n_devices  that are left, in units of `CostToGo`
    """

    least_s: float
    n_left: int
    before_s: float
    stages: tuple[int, ...]
    span_s: float
    waits_s: float
    level: int
    n_devices: int


def plans(to_go: CostToGo, limit_s: float = math.inf) -> Iterator[tuple[float, list[int]]]:
    """(span, indices of the stages) of every plan whose span is at most `limit_s`, best first."""
    problem, n_devices = to_go.problem, to_go.problem.n_devices // to_go.unit
    heap = [
        _PartialPlan(least_s, problem.n_layers, 0.0, (), 0.0, -math.inf, level, n_devices)
        for level in to_go.first_levels
        if (least_s := float(to_go.table[0, -1, level + 1])) <= limit_s and math.isfinite(least_s)
    ]
    heapq.heapify(heap)
    while heap:
        begun = heapq.heappop(heap)
        if begun.n_left == 0:
            yield begun.least_s, list(begun.stages)
            continue
        for longer in _extensions(to_go, begun, limit_s):
            heapq.heappush(heap, longer)


def _extensions(to_go: CostToGo, begun: _PartialPlan, limit_s: float) -> Iterator[_PartialPlan]:
    """The plan with each possible next stage."""
    problem, first = to_go.problem, to_go.problem.n_layers - begun.n_left
    start, end = problem.starts[first : first + 2].tolist()
    last, config = problem.last[start:end], problem.config[start:end]
    left = begun.n_devices - to_go.sizes[config]
    begins = (left >= 0) & to_go.begins[config, begun.n_devices]
    numbers = problem.work_s, problem.added_s, problem.drained_s
    work_s, added_s, drained_s = (of[start:end, begun.level] for of in numbers)
    span_s = np.maximum(begun.span_s, begun.before_s + work_s)
    before_s = begun.before_s + added_s
    waits_s = np.maximum(begun.waits_s, begun.before_s + drained_s - 2 * before_s)
    for level in to_go.levels_after(begun.level):
        at = last + 1, np.maximum(left, 0), level + 1
        rest_s = to_go.table[at]
        after_s = np.where(np.isfinite(rest_s), to_go.added[at], 0.0)
        of_begun = np.maximum(span_s, waits_s + 2 * (before_s + after_s))
        least_s = np.where(begins, np.maximum(of_begun, before_s + rest_s), np.inf)
        for i in np.flatnonzero(np.isfinite(least_s) & (least_s <= limit_s)).tolist():
            yield _PartialPlan(
                float(least_s[i]), problem.n_layers - 1 - int(last[i]), float(before_s[i]),
                (*begun.stages, start + i), float(span_s[i]), float(waits_s[i]), level,
                int(left[i]),
            )  # fmt: skip
