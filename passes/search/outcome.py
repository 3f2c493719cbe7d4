"""The result of planning: the best plan, and one row for every alternative."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.hardware import Hardware
from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.evaluator import Scored
from autopar.passes.search.simulator import Simulated, Solved
from autopar.passes.search.stats import PlanningStats
from autopar.plans import Alternative, PlanSummary
from autopar.units import format_seconds

# What makes so many candidates slower is found out, the fastest first: by simulating those that
# were not.
N_EXPLAINED = 6
# (simulated or None, scored) -> what makes the candidate slower.
Why = Callable[[Solved | None, Scored], tuple[str, PlanSummary]]


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


def alternatives_of(
    scored: Sequence[Scored], simulated: Simulated, chosen: Solved, why: Why | None = None
) -> Iterator[Alternative]:
    """The rows: candidates by time, then those that do not fit, then those that were pruned.

    `why` says of the first `N_EXPLAINED` what makes them slower, and sums them up; None: nothing
    is said.
    """
    known = {solved.candidate.name: solved for solved in simulated.found}
    recipes = {one.candidate.name: one.candidate.recipe for one in scored}
    rows = []
    for one in scored:
        name, recipe = one.candidate.name, one.candidate.recipe
        if name in known:
            solved = known[name]
            row = Alternative(name, solved.step_time_s, "", recipe, solved.peak_bytes)
            rows.append((row, one))
        elif name not in simulated.failed and name not in simulated.pruned_s:
            rows.append((Alternative(name, one.score_s, "", recipe, is_estimate=True), one))
    rows.sort(key=lambda pair: pair[0].step_time_s or 0.0)
    for at, (row, one) in enumerate(rows):
        if why is None or at >= N_EXPLAINED or row.name == chosen.candidate.name:
            yield row
        else:
            slower_by, summary = why(known.get(row.name), one)
            yield replace(row, slower_by=slower_by, summary=summary)
    for name, error in simulated.failed.items():
        yield infeasible_row(name, recipes[name], error)
    for name, time_s in simulated.pruned_s.items():
        yield pruned_row(name, time_s, recipes[name])


def infeasible_row(name: str, recipe: str, error: InfeasibleError) -> Alternative:
    """A candidate that does not fit; the error is the reason where memory is not."""
    note = str(error).splitlines()[0] if error.least_bytes is None else ""
    return Alternative(name, None, note, recipe, error.least_bytes)


def estimated_row(name: str, candidate: Candidate, best_s: float) -> Alternative:
    """A candidate that its proposer's estimate ruled out; `best_s` is the best score before it."""
    times = candidate.estimate_s / best_s
    above = (
        f"{times - 1:.0%} above the best one" if times < 2 else f"{times:.2g} times the best one"
    )
    note = f"ruled out: estimated at {format_seconds(candidate.estimate_s)}, {above}"
    return Alternative(name, None, note, candidate.recipe)


def pruned_row(name: str, time_s: float, recipe: str = "") -> Alternative:
    """A candidate that takes at least `time_s`."""
    return Alternative(name, None, "", recipe, least_s=time_s)
