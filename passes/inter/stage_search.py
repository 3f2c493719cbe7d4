"""The pipelines with one number of microbatches, and bounds on stages, made where they matter.

    for plan in search.plans(limit_s):      best first, by the bounds of its stages
        search.tighten(plan, solve)         until the best plan's stages are all solved

What a stage takes at least is known on four levels. Each holds for every placement of it:

    shared    equal shares of operators and parameters (`bounds.py`)
    free      the optima of its layers on its view, without a memory limit (`layer_bounds.py`)
    budget    the same with a price for bytes, and with recompute
    solved    the bound of its own problem (`passes/intra`)

A level is computed for a stage only if the stage is in the best plan of the levels before. Whatever
it says holds for all stages alike: of equal layers on the same view, with as many microbatches in
flight, or more. A stage has the view on which it is the fastest, and is solved once no other view
may be faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np

from autopar.arrays import Array, BoolArray, Codes, Indices
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.layer_bounds import Part
from autopar.passes.inter.layers import sums_of_ranges
from autopar.passes.inter.space import PipelineSpace
from autopar.passes.solvers.stages import (
    CostToGo,
    StageChoice,
    StageProblem,
    least_span_s,
    plans,
    span_s,
)

# Plans whose bounds are closer than this (relative) are in no order.
_STEP_REL = 1e-3
# A view, a level, and what is bounded.
Key = tuple[int, int, Part]


class StageBound(NamedTuple):
    """Least seconds of a stage in a step: all; of these, those of its microbatches alone, and those
    of once a step. Infinite: it does not fit. `is_settled`: nothing more can be known."""

    whole_s: float
    work_s: float
    once_s: float = 0.0
    is_settled: bool = True


# (pipeline, stage) -> what the stage takes, solved alone.
Solve = Callable[[Candidate, int], StageBound]


class StagePlan(NamedTuple):
    """A pipeline by its stages. No step of it is below `bound_s`, by the bounds of its stages."""

    bound_s: float
    stages: tuple[StageChoice, ...]


class StageSearch:
    """The pipelines of `space` with `m` microbatches. Only stages that alone may be below `most_s`
    are kept.

    bound_s     no plan is below it, but those that were tried
    tried       plans that are left out, by layers and devices of their stages
    given_up_s  the least bound of those whose step is not known
    n_in_vain   how many of them were tried last in a row; the caller counts both

    There is a row for every range of layers on every view. At level j, j stages come after it, at
    the last level j or more. A *cell* is a range on a number of devices.
    """

    def __init__(self, space: PipelineSpace, m: int, most_s: float) -> None:
        self.space, self.m = space, m
        self.bound_s, self.given_up_s, self.n_in_vain = 0.0, math.inf, 0
        self.tried: set[tuple[StageChoice, ...]] = set()
        self._free, self._in_budget = set[int](), set[Key]()
        columns = []
        for view, mesh in enumerate(space.views):
            each_s = space.bounds.each_s(mesh.n_ranks, m)
            passed_s, sent_s = (
                of(mesh.n_ranks, m)
                for of in (space.bounds.messages.passed_s, space.bounds.messages.sent_s)
            )
            least_s = np.maximum(m * each_s, sent_s)
            may_be = space.bounds.may_be(mesh.n_ranks) & (least_s <= most_s)
            first, last = np.nonzero(may_be)
            size = np.full_like(first, space.sizes.index(mesh.n_ranks))
            seconds = (of[may_be] for of in (each_s, passed_s, sent_s))
            columns.append((first, last, size, np.full_like(first, view), *seconds))
        *keys, each_s, passed_s, sent_s = map(np.concatenate, zip(*columns, strict=True))
        order = np.lexsort(np.stack(keys[::-1]))
        self._passed_s, self._sent_s = passed_s[order][:, None], sent_s[order][:, None]
        self._first, self._last, self._size, self._view = (key[order] for key in keys)
        most = space.bounds.most_stages(space.mesh, min(space.sizes), m)
        self._n_levels = space.n_stages or (most if space.is_1f1b else 1)
        self._added_s = np.repeat(each_s[order][:, None], self._n_levels, axis=1)
        self._work_s = m * self._added_s
        self._whole_s = m * self._added_s
        self._is_solved = np.zeros_like(self._whole_s, dtype=bool)

    @property
    def n_stages(self) -> int:
        """How many ranges of layers on views may be stages."""
        return len(self._first)

    @property
    def least_s(self) -> float:
        """Lower bound on all plans whose step is not known; infinite: there is none."""
        return min(self.bound_s, self.given_up_s)

    def plans(self, limit_s: float) -> Iterator[StagePlan]:
        """Plans that may be below `limit_s`, the best first, up to `_STEP_REL`.

        A plan takes at least as long as each of its stages, and at least the span of their work.
        So plans within some seconds have only stages within them, and the recurrence says whether
        there are any. These seconds rise from the bound that is proven. A plan that is given out
        counts as tried, unless it is tightened.
        """
        if not self.n_stages:
            self.bound_s = math.inf
            return
        self.bound_s = max(self.bound_s, least_span_s(self._problem(math.inf)))
        while self.bound_s < limit_s:
            within_s = min(self.bound_s * (1 + _STEP_REL), limit_s)
            problem = self._problem(within_s)
            to_go = CostToGo(problem)
            for plan_s, found in plans(to_go, within_s):
                stages = tuple(map(problem.choice, found))
                if stages not in self.tried:
                    self.tried.add(stages)
                    yield StagePlan(max(plan_s, self.bound_s), self._fastest_views(found))
            if to_go.least_s > within_s:
                within_s = self._next_s(within_s)
            elif within_s >= self._most_of_all_s:
                within_s = math.inf
            self.bound_s = within_s

    def _next_s(self, within_s: float) -> float:
        """The least bound of any plan, if none is within these seconds; infinite: there is none.

        The more seconds stages may take, the shorter is the least span. Where it meets them is the
        bound.
        """
        whole_s, *_ = self._cell_bounds
        longer_s = np.unique(whole_s[(whole_s > within_s) & np.isfinite(whole_s)])
        low, high = 0, len(longer_s)
        while low < high:
            middle = (low + high) // 2
            most_s = float(longer_s[middle])
            if least_span_s(self._problem(most_s)) <= most_s:
                high = middle
            else:
                low = middle + 1
        before_s = float(longer_s[low - 1]) if low else within_s
        next_s = float(longer_s[low]) if low < len(longer_s) else math.inf
        return min(next_s, least_span_s(self._problem(before_s)))

    def solve_all(self, plan: StagePlan, solve: Solve, limit_s: float) -> bool:
        """Solve the stages of a plan; False if it is not below `limit_s`."""
        while self.least_of(plan.stages) < limit_s:
            if not self.tighten(plan, solve):
                return True
        return False

    def _cells_of(self, plan: StagePlan) -> tuple[StageChoice, ...]:
        """Its stages by their number of devices, in place of a view."""
        views, sizes = self.space.views, self.space.sizes
        return tuple(
            stage._replace(config=sizes.index(views[stage.config].n_ranks)) for stage in plan.stages
        )

    def tighten(self, plan: StagePlan, solve: Solve) -> bool:
        """Put stages of a plan on a further level; False if all are solved, so that it is tried."""
        views, (rows, levels) = [s.config for s in plan.stages], self._places(plan.stages)
        cells = self._cells_of(plan)
        self.tried.discard(cells)
        if unknown := set(views) - self._free:
            for view in sorted(unknown):
                self._add_free(view)
            return True
        for part in get_args(Part):
            wanted = {(*at, part) for at in zip(views, levels, strict=True)}
            if new := wanted - self._in_budget:
                for key in sorted(new):
                    self._add_budget(key, plan.bound_s)
                return True
        unsolved = [
            (float(self._whole_s[row, level]), k)
            for k, (row, level) in enumerate(zip(rows, levels, strict=True))
            if not self._is_solved[row, level]
        ]
        if not unsolved:
            self.tried.add(cells)
            return False
        _, k = max(unsolved)  # the longest: if it alone is too slow, no other needs to be solved
        found = solve(self.space.candidate(self.m, plan.stages), k)
        alike, level = self._alike == self._alike[rows[k]], levels[k]
        self._is_solved[alike, level] = found.is_settled
        self._raise(self._whole_s, alike, slice(level, None), found.whole_s)
        # A first stage does not wait before its first microbatch, nor after its last.
        is_first = self._first == 0
        for rows_of, once_s in ((alike & ~is_first, 0.0), (alike & is_first, found.once_s)):
            self._raise(self._work_s, rows_of, slice(level, None), found.work_s + once_s)
            if math.isfinite(found.work_s):
                added_s = found.work_s / self.m + once_s
                self._raise(self._added_s, rows_of, slice(level, level + 1), added_s)
        return True

    def least_of(self, stages: Sequence[StageChoice]) -> float:
        """The bound on one plan so far."""
        at = self._places(stages)
        work_s, added_s = self._work_s[at], np.minimum(self._added_s[at], self._work_s[at])
        rows, _ = at
        sent_s, added_s = self._sent_s[rows, 0], added_s + self._passed_s[rows, 0]
        longest_s = float(np.maximum(self._whole_s[at], sent_s).max())
        return max(longest_s, span_s(work_s, added_s, self._drains_m))

    @property
    def _drains_m(self) -> int | None:
        """`StageProblem.n_microbatches`."""
        return self.m if self.space.is_1f1b else None

    def _places(self, stages: Sequence[StageChoice]) -> tuple[list[int], list[int]]:
        """The row and the level of every stage."""
        n = len(stages)
        levels = [min(n - 1 - k, self._n_levels - 1) for k in range(n)]
        return [self._rows[stage] for stage in stages], levels

    def _add_free(self, view: int) -> None:
        found = self.space.layer_bounds.free(self.space.views[view], self.m)
        rows = self._view == view
        at = self._first[rows], self._last[rows]
        whole_s, work_s = (sums_of_ranges(of_layers)[at][:, None] for of_layers in found)
        self._raise(self._whole_s, rows, slice(None), whole_s)
        self._raise(self._work_s, rows, slice(None), work_s)
        self._raise(self._added_s, rows, slice(None), work_s / self.m)
        self._free.add(view)

    def _add_budget(self, key: Key, step_s: float) -> None:
        (view, level, part), space = key, self.space
        depth, rows = space.depth(self.m, level + 1), self._view == view
        found = space.layer_bounds.budget_bounds(
            space.views[view], self.m, depth, space.budget_bytes, step_s, part
        )
        seconds = found[self._first[rows], self._last[rows]][:, None]
        of = self._whole_s if part == "whole_s" else self._work_s
        # More microbatches in flight need more memory, so they take no less.
        self._raise(of, rows, slice(level, None), seconds)
        self._in_budget.add(key)

    def _raise(self, of: Array, rows: BoolArray, levels: slice, seconds: Array | float) -> None:
        of[rows, levels] = np.maximum(of[rows, levels], seconds)
        self.__dict__.pop("_cell_bounds", None)

    @cached_property
    def _cell_bounds(self) -> tuple[Array, Array, Array]:
        """What each cell takes at least: all or all that it sends, its work, and what it adds with
        its messages, [cells, levels] each.

        The latter two are those of its fastest view, if that is solved.
        """
        starts = self._cells
        whole_s = np.minimum.reduceat(self._whole_s, starts)
        is_best = self._whole_s == np.repeat(whole_s, np.diff([*starts, self.n_stages]), axis=0)
        counts = is_best & self._is_solved
        work_s, added_s = (_row_minima(of, starts, counts) for of in (self._work_s, self._added_s))
        added_s = np.minimum(added_s, work_s) + self._passed_s[starts]
        return np.maximum(whole_s, self._sent_s[starts]), work_s, added_s

    def _problem(self, within_s: float) -> StageProblem:
        """The cells that alone take at most so long."""
        space, starts, (whole_s, work_s, added_s) = self.space, self._cells, self._cell_bounds
        work_s = np.where(whole_s <= within_s, work_s, np.inf)
        return StageProblem(
            self._first[starts], self._last[starts], self._size[starts], work_s,
            added_s, tuple(space.sizes), space.layers.n_layers,
            space.mesh.n_ranks, space.n_stages, space.mesh.devices_per_node, self._drains_m,
        )  # fmt: skip

    def _fastest_views(self, cells: Sequence[int]) -> tuple[StageChoice, ...]:
        """The stages of some cells, each on its fastest view; a solved one, if several are."""
        out, ends = [], [*self._cells[1:], self.n_stages]
        for k, cell in enumerate(cells):
            level, start = min(len(cells) - 1 - k, self._n_levels - 1), self._cells[cell]
            of_views = self._whole_s[start : ends[cell], level]
            solved = self._is_solved[start : ends[cell], level]
            row = start + int(np.lexsort((~solved, of_views))[0])
            columns = self._first[row], self._last[row], self._view[row]
            out.append(StageChoice(*map(int, columns)))
        return tuple(out)

    @property
    def _most_of_all_s(self) -> float:
        """No plan that may fit takes longer, or has a longer span."""
        whole_s, work_s, added_s = self._cell_bounds
        fits = np.isfinite(whole_s)
        most_added_s = 2 * self._n_levels * added_s[fits].max(initial=0.0)
        spans_s = work_s[fits].max(initial=0.0) + most_added_s
        return float(max(spans_s, whole_s[fits].max(initial=0.0)))

    @cached_property
    def _cells(self) -> Codes:
        """The first row of each cell."""
        keys = np.stack((self._first, self._last, self._size))
        is_new = np.any(keys[:, 1:] != keys[:, :-1], axis=0)
        return np.flatnonzero(np.concatenate(([True], is_new)))

    @cached_property
    def _rows(self) -> dict[StageChoice, int]:
        columns = zip(self._first.tolist(), self._last.tolist(), self._view.tolist(), strict=True)
        return {StageChoice(*of): row for row, of in enumerate(columns)}

    @cached_property
    def _alike(self) -> Indices:
        """[rows]: equal numbers for stages of equal layers on the same view."""
        kinds = self.space.kinds
        known: dict[object, int] = {}
        out = [
            known.setdefault((*kinds[first : last + 1], view), len(known))
            for first, last, view in self._rows
        ]
        return np.array(out, dtype=np.int64)


def _row_minima(of_rows: Array, starts: Codes, counts: BoolArray) -> Array:
    """[cells, levels]: the least of the rows that count, or of all if none does."""
    found: Array = np.minimum.reduceat(of_rows, starts)
    rows = np.flatnonzero(counts.any(axis=1))  # few
    cells = np.searchsorted(starts, rows, side="right") - 1
    some = np.full(found.shape, np.inf)
    np.minimum.at(some, cells, np.where(counts[rows], of_rows[rows], np.inf))
    return np.where(np.isfinite(some), some, found)
