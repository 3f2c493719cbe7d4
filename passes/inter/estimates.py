"""Estimated stage times, corrected by the stages that were solved.

The tables of a view (`tables.py`) are read off one placement of the whole program. A stage that is
solved alone can do better: it may place its ends otherwise, and trade work per step for work per
microbatch. The estimate of a stage is the first of these that applies (`Estimates.tables`):

    the solver's numbers                   if the stage was solved, on this view and with this
                                           number of microbatches
    r (time, once)  +  s conversions       otherwise

r and s are learned per view (`Estimates.learn`). r <= 1 is the least ratio of solved time to table
time, and s >= 0 the least share of its conversions that a solved stage paid. Before any stage of
the view is solved, r = 1 and s = 0.

The second estimate is optimistic, so unknown stages get tried. A search that solves its best plan
and then searches again ends with a plan whose stages are all solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import LogicalMesh
from autopar.passes.inter.score import StageSeconds
from autopar.passes.inter.tables import StageTable

Array = NDArray[np.float64]
Range = tuple[int, int]


@dataclass
class Estimates:
    """The solver's numbers by (microbatches, table) and range of layers; r and s by view."""

    _solved: dict[tuple[int, StageTable], dict[Range, StageSeconds]] = field(default_factory=dict)
    _time_ratio: dict[LogicalMesh, float] = field(default_factory=dict)
    _conversion_share: dict[LogicalMesh, float] = field(default_factory=dict)

    @property
    def least_time_ratio(self) -> float:
        """The least r of any view; 1 before any stage was solved."""
        return min(self._time_ratio.values(), default=1.0)

    def tables(self, m: int, config: StageTable) -> tuple[Array, Array]:
        """Seconds per microbatch and once per step, [first layer, last layer], without messages."""
        ratio = self._time_ratio.get(config.view, 1.0)
        conversion_share = self._conversion_share.get(config.view, 0.0)
        time_s = ratio * config.ranges("time")
        if conversion_share:
            time_s = np.maximum(time_s + conversion_share * config.conversions(), 0.0)
        once_s = ratio * config.ranges("once")
        for at, seconds in self._solved.get((m, config), {}).items():
            time_s[at], once_s[at] = seconds.time_s, seconds.once_s
        return time_s, once_s

    def of(self, m: int, config: StageTable, first: int, last: int) -> StageSeconds:
        time_s, once_s = self.tables(m, config)
        return StageSeconds(float(time_s[first, last]), float(once_s[first, last]))

    def learn(
        self, m: int, configs: Sequence[StageTable], chosen: int, at: Range, seconds: StageSeconds
    ) -> None:
        """Record what a solved stage takes, and update r and s of its view.

        Its numbers replace those of `configs[chosen]`, and of every other table of the same view
        that promised a faster step.
        """
        config = configs[chosen]
        step_s = m * seconds.time_s + seconds.once_s
        expected_s = self._expected_s(m, config, at)
        view, conversions_s = config.view, m * float(config.conversions()[at])
        self._time_ratio[view] = min(self._time_ratio.get(view, 1.0), step_s / expected_s)
        if conversions_s > 0:
            conversion_share = max(step_s - expected_s, 0.0) / conversions_s
            self._conversion_share[view] = min(
                self._conversion_share.get(view, 1.0), conversion_share
            )
        for other in configs:
            hoped = other.view == view and self._expected_s(m, other, at) < step_s
            if other is config or hoped:
                self._solved.setdefault((m, other), {})[at] = seconds

    def _expected_s(self, m: int, config: StageTable, at: Range) -> float:
        """Seconds of a step, by the table alone."""
        time_s, once_s = (float(config.ranges(p)[at]) for p in ("time", "once"))
        return m * time_s + once_s
