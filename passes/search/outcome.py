"""What planning found: the winner, and what is said of everything else that was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost.hardware import Hardware
from autopar.errors import InfeasibleError
from autopar.passes.search.evaluator import Scored
from autopar.passes.search.simulator import Simulated, Solved
from autopar.passes.search.stats import PlanningStats
from autopar.plans import Alternative
from autopar.units import format_seconds


@dataclass(frozen=True)
class PlanningResult:
    """The winning plan, what it beat, and what finding it took."""

    solved: Solved
    hardware: Hardware
    alternatives: tuple[Alternative, ...] = ()
    stats: PlanningStats = field(default_factory=PlanningStats)

    @property
    def forbid(self) -> frozenset[str]:
        return self.solved.candidate.stages[0].constraints.forbid


def fastest_of(scored: Sequence[Scored], simulated: Simulated) -> Solved:
    """Among equals the first: a search before the recipes it ties with, one stage before more.

    Raises the `InfeasibleError` that misses least where nothing fits.
    """
    if not simulated.found:
        raise min(simulated.failed.values(), key=lambda error: error.least_bytes or math.inf)
    known = {solved.candidate.name: solved for solved in simulated.found}
    least_s = min(solved.step_time_s for solved in known.values()) * (1 + 1e-9)
    names = [one.candidate.name for one in scored if one.candidate.name in known]
    return next(known[name] for name in names if known[name].step_time_s <= least_s)


def rows_of(scored: Sequence[Scored], simulated: Simulated) -> Iterator[Alternative]:
    """What each takes, by time; then what does not fit, and what is slower if it does."""
    known = {solved.candidate.name: solved.step_time_s for solved in simulated.found}
    rows = []
    for one in scored:
        name = one.candidate.name
        if name in known:
            rows.append(Alternative(name, known[name]))
        elif name not in simulated.failed and name not in simulated.slower_s:
            rows.append(Alternative(name, one.score_s, "not simulated"))
    yield from sorted(rows, key=lambda row: row.step_time_s or 0.0)
    for name, error in simulated.failed.items():
        yield without_plan(name, error)
    for name, time_s in simulated.slower_s.items():
        yield at_least(name, time_s)


def without_plan(name: str, error: InfeasibleError) -> Alternative:
    return Alternative(name, None, str(error).splitlines()[0])


def at_least(name: str, time_s: float) -> Alternative:
    return Alternative(name, None, f"at least {format_seconds(time_s)}")
