"""What stages are expected to take, and what was learned from those that were solved.

The tables of a view (`stage_costs.py`) are read off one way to place the whole program. A stage
solved alone may place its ends otherwise, and trade what it does once for what it does in each
microbatch. So a stage of one of the first rules below takes

    as solved                              a stage that was solved alone, on this view and with as
                                           many microbatches
    r (time, once)  +  s conversions       another: r <= 1 is the least that a solved stage of its
                                           view took of what was expected, s >= 0 the least share of
                                           conversions that one paid; 1 and 0 before any was solved

The second is hopeful, so that what is not known is tried: a search that solves what looks best,
and looks again, ends with a plan of which no stage is hoped for.
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
    """Of stages as ranges of layers."""

    _solved: dict[tuple[int, int], dict[Range, StageSeconds]] = field(default_factory=dict)
    _share: dict[LogicalMesh, float] = field(default_factory=dict)
    _paid: dict[LogicalMesh, float] = field(default_factory=dict)

    @property
    def least_share(self) -> float:
        """The least r of any view."""
        return min(self._share.values(), default=1.0)

    def tables(self, m: int, config: StageTable) -> tuple[Array, Array]:
        """Seconds of a microbatch and once per step, [first, last layer]; without messages."""
        share, paid = self._share.get(config.view, 1.0), self._paid.get(config.view, 0.0)
        time_s = share * config.ranges("time")
        if paid:
            time_s = np.maximum(time_s + paid * config.conversions(), 0.0)
        once_s = share * config.ranges("once")
        for at, worked in self._solved.get((m, id(config)), {}).items():
            time_s[at], once_s[at] = worked
        return time_s, once_s

    def of(self, m: int, config: StageTable, first: int, last: int) -> StageSeconds:
        time_s, once_s = self.tables(m, config)
        return StageSeconds(float(time_s[first, last]), float(once_s[first, last]))

    def learn(
        self, m: int, configs: Sequence[StageTable], chosen: int, at: Range, worked: StageSeconds
    ) -> None:
        """A stage was solved: in place of configuration `chosen` of `configs`, and of others of its
        view that were expected to be faster."""
        config = configs[chosen]
        step_s = m * worked.time_s + worked.once_s
        expected_s = self._expected_s(m, config, at)
        view, conversions_s = config.view, m * float(config.conversions()[at])
        self._share[view] = min(self._share.get(view, 1.0), step_s / expected_s)
        if conversions_s > 0:
            paid = max(step_s - expected_s, 0.0) / conversions_s
            self._paid[view] = min(self._paid.get(view, 1.0), paid)
        for other in configs:
            hoped = other.view == view and self._expected_s(m, other, at) < step_s
            if other is config or hoped:
                self._solved.setdefault((m, id(other)), {})[at] = worked

    def _expected_s(self, m: int, config: StageTable, at: Range) -> float:
        """Of a step, by the tables alone."""
        time_s, once_s = (float(config.ranges(p)[at]) for p in ("time", "once"))
        return m * time_s + once_s
