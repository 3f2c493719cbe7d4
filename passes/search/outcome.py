"""The result of planning: the best plan, and one row for every alternative."""

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
    """The best plan, its alternatives and statistics; `bound_s` is a lower bound on every plan."""

    solved: Solved
    hardware: Hardware
    alternatives: tuple[Alternative, ...] = ()
    bound_s: float | None = None
    stats: PlanningStats = field(default_factory=PlanningStats)

    @property
    def forbid(self) -> frozenset[str]:
        return self.solved.candidate.stages[0].constraints.forbid


def fastest_of(scored: Sequence[Scored], simulated: Simulated) -> Solved:
    """The fastest simulated candidate; among equals the first of `scored`.

    So a search wins over recipes that tie with it, and one stage over several.

    Raises the `InfeasibleError` with the fewest missing bytes if nothing fits.
    """
    if not simulated.found:
        raise min(simulated.failed.values(), key=lambda error: error.least_bytes or math.inf)
    known = {solved.candidate.name: solved for solved in simulated.found}
    least_s = min(solved.step_time_s for solved in known.values()) * (1 + 1e-9)
    names = [one.candidate.name for one in scored if one.candidate.name in known]
    return next(known[name] for name in names if known[name].step_time_s <= least_s)


def alternatives_of(scored: Sequence[Scored], simulated: Simulated) -> Iterator[Alternative]:
    """The rows: candidates by time, then those that do not fit, then those that were pruned."""
    known = {solved.candidate.name: solved for solved in simulated.found}
    recipes = {one.candidate.name: one.candidate.recipe for one in scored}
    rows = []
    for one in scored:
        name, recipe = one.candidate.name, one.candidate.recipe
        if name in known:
            solved = known[name]
            rows.append(Alternative(name, solved.step_time_s, "", recipe, solved.peak_bytes))
        elif name not in simulated.failed and name not in simulated.pruned_s:
            rows.append(Alternative(name, one.score_s, "not simulated", recipe))
    yield from sorted(rows, key=lambda row: row.step_time_s or 0.0)
    for name, error in simulated.failed.items():
        yield infeasible_row(name, recipes[name], error)
    for name, time_s in simulated.pruned_s.items():
        yield pruned_row(name, time_s)


def infeasible_row(name: str, recipe: str, error: InfeasibleError) -> Alternative:
    return Alternative(name, None, str(error).splitlines()[0], recipe, error.least_bytes)


def pruned_row(name: str, time_s: float) -> Alternative:
    return Alternative(name, None, f"at least {format_seconds(time_s)}")
