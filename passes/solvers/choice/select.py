"""Which solver answers a choice problem; every path proves the same optimum, or tells the gap.

`solve(problem, "auto")`:

1. pass messages: their choice is the answer where their bound meets it, or is as near as
   `gap_goal`;
2. drop choices that their bound rules out (`MessagePassing.marks`);
3. eliminate, or pass messages again where the graph is too wide for tables;
4. let the ILP close the gap on what the bound leaves (`_core`), within its limit of work. If no
   choice is known by then, the ILP is the only solver that is left.

Steps 1 and 3 price the bytes if the budget binds (`_bracket`, `lagrangian.py`).
`solve(problem, "ilp")` solves the whole, unreduced ILP, which checks all of the above.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Literal

from autopar.errors import OptionError
from autopar.passes.solvers.choice.ilp import WorkLimit, minimise_cost, solve_ilp
from autopar.passes.solvers.choice.lagrangian import (
    Bracket,
    Elimination,
    Hull,
    Minimiser,
    Point,
    keep_marks,
    search,
)
from autopar.passes.solvers.choice.message_passing import QUICK, MessagePassing
from autopar.passes.solvers.choice.reductions import Reduced, drop_forbidden, restrict
from autopar.passes.solvers.eliminate import (
    EliminationPlan,
    TableLimits,
    TooWide,
    plan_elimination,
)
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    SAME_OPTIMUM_REL,
    Choice,
    ChoiceProblem,
    Infeasible,
    Solution,
    Weights,
    infeasible_budget,
    make_solution,
    within,
)

Solver = Literal["auto", "ilp"]


def solve(
    problem: ChoiceProblem,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    limits: TableLimits | None = None,
    gap_goal: float = 0.0,
    work_limit: WorkLimit | None = None,
) -> Solution[Choice] | Infeasible:
    """The cheapest choice within the budget.

    After `time_limit_s` the best choice so far is returned, with the gap that is left. `limits`
    bound the tables of elimination; wider problems are left to messages and the ILP. "auto" stops
    at a choice proven to be within `gap_goal` (relative) of the optimum. The ILP may spend
    `work_limit` on closing a wider gap.

    Raises `OptionError` for an unknown `solver`, `TimeLimitError` when the time passes before any
    feasible choice is known.
    """
    if solver == "ilp":
        return solve_ilp(problem, time_limit_s)
    if solver != "auto":
        raise OptionError(f'solver={solver!r} must be "auto" or "ilp"')
    deadline = time.perf_counter() + (math.inf if time_limit_s is None else time_limit_s)
    quick = QUICK.and_(limits) if limits else QUICK
    whole = Reduced.whole(problem.merged())
    messages = MessagePassing(whole.problem, quick)
    sent = _bracket(messages, problem.budget_bytes, deadline)
    if isinstance(sent, Infeasible):
        return sent
    left: Reduced | None = whole
    if sent is not None:
        if sent.is_within(gap_goal):
            return make_solution(problem, sent.best.choice, sent.open_bound_s)
        left = drop_forbidden(restrict(whole, messages.marks(sent)))
    assert left is not None, "the best choice known is left"
    plan = _plan(left.problem, limits)
    minimiser: Minimiser[Choice] = MessagePassing(left.problem, quick)
    if plan is not None:
        minimiser = Elimination(left.problem, plan)
    found = _bracket(minimiser, problem.budget_bytes, deadline)
    if isinstance(found, Infeasible):
        return found
    if found is None:
        return _solution_by_ilp(problem, left, deadline, work_limit)
    if not found.is_within(gap_goal) and time.perf_counter() < deadline:
        found = _close_gap(found, left, plan, deadline, work_limit)
    return make_solution(problem, left.lift(found.best.choice), found.open_bound_s)


def _plan(problem: ChoiceProblem, limits: TableLimits | None) -> EliminationPlan | None:
    """The elimination plan of a problem; None: it exceeds `limits`."""
    try:
        return plan_elimination(problem, limits)
    except TooWide:
        return None


def _bracket(
    minimiser: Minimiser[Choice], budget_bytes: float | None, deadline: float
) -> Bracket[Choice] | Infeasible | None:
    """The best choice within the budget, at prices of bytes if it binds, and a bound; None: the
    minimiser found no choice that fits."""
    hull = Hull(minimiser)
    bound_s, fastest = hull.at(0.0)
    if math.isinf(bound_s):
        return FORBIDDEN
    bracket = Bracket(fastest, bound_s, 0.0)
    if budget_bytes is not None and not within(budget_bytes, fastest.totals.bytes):
        least_bytes, lean = minimiser.at(Weights(0.0, size=1.0))
        if not within(budget_bytes, lean.totals.bytes):
            is_leanest = lean.totals.bytes <= least_bytes * (1 + SAME_OPTIMUM_REL)
            return infeasible_budget(budget_bytes, lean.totals.bytes) if is_leanest else None
        hull.corners.append(lean)
        bracket = search(hull, budget_bytes, deadline)
    return None if math.isinf(bracket.best.totals.cost_s) else bracket


def _close_gap(
    bracket: Bracket[Choice],
    reduced: Reduced,
    plan: EliminationPlan | None,
    deadline: float,
    work_limit: WorkLimit | None,
) -> Bracket[Choice]:
    """Close the gap by the ILP of the core, which holds all that may be better."""
    best, bound_s = bracket.best, bracket.bound_s
    core = _core(reduced.problem, plan, bracket)
    result = minimise_cost(core.problem, _seconds_left(deadline), work_limit)
    if result.choice is not None:
        choice = core.lift(result.choice)
        found = Point(choice, reduced.problem.evaluate(choice))
        best = min(best, found, key=lambda point: point.totals.cost_s)
    if math.isfinite(result.bound):  # infinite: the ILP lost the known choice
        # Whatever the core leaves out is dearer than the best choice known.
        bound_s = max(bound_s, min(result.bound, best.totals.cost_s))
    return replace(bracket, best=best, bound_s=bound_s)


def _core(
    problem: ChoiceProblem, plan: EliminationPlan | None, bracket: Bracket[Choice]
) -> Reduced:
    """The part of `problem` that may be in a solution no dearer than the bracket's best; all of it
    without a plan, or where min-marginals need too much memory."""
    whole = Reduced.whole(problem)
    if plan is None:
        return whole
    try:
        core = drop_forbidden(restrict(whole, keep_marks(problem, plan, bracket)))
    except TooWide:
        return whole
    assert core is not None, "the best choice known is in the core"
    return core


def _solution_by_ilp(
    problem: ChoiceProblem, reduced: Reduced, deadline: float, work_limit: WorkLimit | None
) -> Solution[Choice] | Infeasible:
    """The reduced problem as an ILP, however many columns: no other solver is left."""
    work_limit = work_limit and replace(work_limit, n_columns=None)
    found = solve_ilp(reduced.problem, _seconds_left(deadline), work_limit=work_limit)
    if isinstance(found, Infeasible):
        return found
    return make_solution(problem, reduced.lift(found.choice), found.bound_s)


def _seconds_left(deadline: float) -> float | None:
    """What is left of the time; None: there is no limit."""
    return None if math.isinf(deadline) else max(deadline - time.perf_counter(), 0.0)
