"""The result of planning: the best plan, and one row for every alternative."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate
from autopar.passes.search.branch_bound import BranchAndBound, Node
from autopar.passes.search.evaluator import Proposal
from autopar.passes.search.simulator import Solved
from autopar.passes.search.stats import PlanningStats
from autopar.plans import Alternative, PlanSummary

# What makes so many candidates slower is found out, the fastest first: by simulating those that
# were not.
N_EXPLAINED = 6
# A candidate that is slower -> what makes it slower, and its summary.
Why = Callable[[Solved | Proposal], tuple[str, PlanSummary]]
# Why candidates have no plan.
Errors = Sequence[tuple[InfeasibleError, Candidate]]


@dataclass(frozen=True)
class PlanningResult:
    """The best plan, its alternatives and statistics.

    bound_s    lower bound on every plan that was searched; None if one recipe was asked for
    ruled_out  level of the search -> how many sets of plans got no further
    """

    solved: Solved
    alternatives: tuple[Alternative, ...] = ()
    bound_s: float | None = None
    ruled_out: Mapping[str, int] = field(default_factory=dict)
    stats: PlanningStats = field(default_factory=PlanningStats)

    @property
    def forbid(self) -> frozenset[str]:
        return self.solved.candidate.stages[0].constraints.forbid


def alternatives_of(
    search: BranchAndBound,
    errors: Errors,
    chosen: Solved,
    named: Callable[[Solved], Solved],
    why: Why | None = None,
) -> Iterator[Alternative]:
    """A row per name: what was simulated or solved by time, what does not fit, what was ruled out.

    `named` names the axes of what was simulated. `why` says of the first `N_EXPLAINED` what makes
    them slower, and sums them up; None: nothing is said.
    """
    rows = list[tuple[Alternative, Solved | Proposal]]()
    fastest, least = dict[str, Solved](), dict[str, Node]()
    for solved in sorted(search.found, key=lambda s: s.step_time_s):
        fastest.setdefault(solved.candidate.name, solved)
    fastest[chosen.candidate.name] = chosen
    timed, chosen_name = {*fastest}, named(chosen).candidate.name
    for solved in map(named, fastest.values()):
        name, recipe = solved.candidate.name, solved.candidate.recipe
        rows.append((Alternative(name, solved.step_time_s, "", recipe, solved.peak_bytes), solved))
    for node in sorted(search.nodes, key=lambda n: n.bound_s):
        if node.row_name not in fastest and not node.is_silent:
            least.setdefault(node.row_name, node)
    for name, node in least.items():
        if node.placed is not None and node.recipe:
            time_s = node.placed.least_s
            row = Alternative(name, time_s, "", node.recipe, is_estimate=True)
            rows.append((row, node.placed))
            timed.add(name)
    rows.sort(key=lambda pair: pair[0].step_time_s or 0.0)
    for at, (row, one) in enumerate(rows):
        if why is None or at >= N_EXPLAINED or row.name == chosen_name:
            yield row
        else:
            slower_by, summary = why(one)
            yield replace(row, slower_by=slower_by, summary=summary)
    solved_rows = {one.candidate.row for _, one in rows}
    leanest = dict[str, tuple[InfeasibleError, str]]()
    for error, candidate in sorted(errors, key=lambda e: e[0].least_bytes or math.inf):
        leanest.setdefault(candidate.row or candidate.name, (error, candidate.recipe))
    for name, (error, recipe) in leanest.items():
        if name not in timed and name not in least and name not in solved_rows:
            yield infeasible_row(name, recipe, error)
    for name, node in least.items():
        if name not in timed and (node.note or node.refine is not None):
            yield pruned_row(name, node)


def infeasible_row(name: str, recipe: str, error: InfeasibleError) -> Alternative:
    """A candidate that does not fit; the error is the reason where memory is not."""
    note = str(error).splitlines()[0] if error.least_bytes is None else ""
    return Alternative(name, None, note, recipe, error.least_bytes)


def pruned_row(name: str, node: Node) -> Alternative:
    """Candidates that take at least so long, or what else is known of them."""
    least_s = None if node.note else node.bound_s
    return Alternative(name, None, node.note, node.recipe, least_s=least_s)
