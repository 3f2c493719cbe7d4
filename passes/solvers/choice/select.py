"""Which solver answers a choice problem; every path proves the same optimum, or tells the gap.

`solve(problem, "auto")`:

1. pass messages (`_by_messages`): their choice is the answer where their bound meets it, or is as
   near as `gap_goal`;
2. drop choices that their bound rules out (`MessagePassing.marks`), and those that cannot matter
   (`reductions.py`), unless elimination is quick without that (`as_it_is`);
3. eliminate;
4. if the result exceeds the budget, price the bytes (`lagrangian.py`), drop what the bound rules
   out, and let the ILP close the gap on what remains (`_within_budget`);
5. if the graph is too wide for tables, let the ILP close the gap of the messages, within its limit
   of work; if they found no choice, the reduced problem goes to the ILP (`_by_ilp`).

`solve(problem, "ilp")` solves the whole, unreduced ILP, which checks all of the above.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from autopar.errors import OptionError
from autopar.passes.solvers.choice.ilp import WorkLimit, minimise_cost, solve_ilp
from autopar.passes.solvers.choice.lagrangian import (
    Bracket,
    Elimination,
    Hull,
    Point,
    keep_marks,
    search,
)
from autopar.passes.solvers.choice.message_passing import QUICK, MessagePassing
from autopar.passes.solvers.choice.reductions import Reduced, drop_forbidden, reduce, restrict
from autopar.passes.solvers.eliminate import EliminationPlan, TableLimits, TooWide, plan_elimination
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    SAME_OPTIMUM_REL,
    Choice,
    ChoiceProblem,
    Infeasible,
    Solution,
    Weights,
    make_solution,
    over_budget,
    within,
)

Solver = Literal["auto", "ilp"]
C = TypeVar("C")
# The part of a problem that may hold something better than the bracket's best.
_Core = Callable[[Bracket[Choice]], Reduced]


class _Clock:
    """Wall time by phase, and what is left of the limit."""

    def __init__(self, time_limit_s: float | None) -> None:
        self.phase_s: dict[str, float] = {}
        self.limit_s = math.inf if time_limit_s is None else time_limit_s
        self.deadline = time.perf_counter() + self.limit_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phase_s[name] = self.phase_s.get(name, 0.0) + time.perf_counter() - start

    def left_s(self) -> float | None:
        if math.isinf(self.limit_s):
            return None
        return max(self.deadline - time.perf_counter(), 0.0)


def solve(
    problem: ChoiceProblem,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    limits: TableLimits | None = None,
    gap_goal: float = 0.0,
    work_limit: WorkLimit | None = None,
) -> Solution | Infeasible:
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
    clock = _Clock(time_limit_s)
    merged, quick = problem.merged(), QUICK.and_(limits) if limits else QUICK
    minimiser = MessagePassing(merged, quick)
    sent = _by_messages(minimiser, clock)
    if isinstance(sent, Infeasible):
        return sent
    if sent is not None and sent.is_within(gap_goal):
        found, bound_s = sent.best.choice, sent.open_bound_s
        return _finish(problem, Reduced.whole(merged), found, bound_s, "messages", clock)
    left: Reduced | None = Reduced.whole(merged)
    if sent is not None:
        with clock.phase("messages"):
            left = drop_forbidden(restrict(Reduced.whole(merged), minimiser.marks(sent)))
    assert left is not None, "the best choice known is left"
    with clock.phase("order"):
        ready = as_it_is(left, quick)
    if ready is None:
        with clock.phase("reduce"):
            smaller = reduce(left)
        if smaller is None:
            return FORBIDDEN
        try:
            with clock.phase("order"):
                ready = smaller, plan_elimination(smaller.problem, limits)
        except TooWide:
            return _too_wide(problem, smaller, clock, quick, gap_goal, work_limit)
    reduced, plan = ready
    with clock.phase("eliminate"):
        elimination = Elimination(reduced.problem, plan)
        value, fastest = elimination.at(Weights())
    if math.isinf(value):
        return FORBIDDEN
    if problem.fits(fastest.totals.bytes):
        return _finish(problem, reduced, fastest.choice, None, "elimination", clock)
    return _within_budget(problem, reduced, plan, fastest, clock, gap_goal, work_limit)


def as_it_is(reduced: Reduced, limits: TableLimits) -> tuple[Reduced, EliminationPlan] | None:
    """A problem and its elimination plan; None: elimination exceeds `limits`.

    Elimination is faster with fewer choices. But finding out which choices cannot matter takes
    longer than a quick elimination.
    """
    try:
        plan = plan_elimination(reduced.problem, limits)
    except TooWide:
        return None
    return reduced, plan


def solve_by_elimination(
    problem: ChoiceProblem, limits: TableLimits | None = None
) -> Solution | Infeasible:
    """Elimination alone, on the problem as it is; the budget must be None.

    Raises `TooWide` when the tables would exceed `limits`.
    """
    assert problem.budget_bytes is None, "elimination alone knows no budget"
    merged = problem.merged()
    plan = plan_elimination(merged, limits)
    elimination = Elimination(merged, plan)
    value, fastest = elimination.at(Weights())
    if math.isinf(value):
        return FORBIDDEN
    return make_solution(problem, fastest.choice, None, "elimination")


def _within_budget(
    problem: ChoiceProblem,
    reduced: Reduced,
    plan: EliminationPlan,
    fastest: Point[Choice],
    clock: _Clock,
    gap_goal: float,
    work_limit: WorkLimit | None,
) -> Solution | Infeasible:
    """Step 3: the bound, the choices it leaves, and the ILP on those."""
    assert problem.budget_bytes is not None
    hull = Hull(Elimination(reduced.problem, plan))
    with clock.phase("leanest"):
        lean = hull.leanest
    if not problem.fits(lean.totals.bytes):
        return over_budget(problem.budget_bytes, lean.totals.bytes)
    with clock.phase("lagrangian"):
        hull.add(0.0, fastest.totals.cost_s, fastest)
        bracket = search(hull, problem.budget_bytes, clock.deadline)
    core = partial(_core, reduced.problem, plan)
    return _closed(problem, reduced, bracket, core, "lagrangian", clock, gap_goal, work_limit)


def _closed(
    problem: ChoiceProblem,
    reduced: Reduced,
    bracket: Bracket[Choice],
    core: _Core,
    method: str,
    clock: _Clock,
    gap_goal: float,
    work_limit: WorkLimit | None,
) -> Solution:
    """Close a gap above the goal by the ILP of the `core`, which holds all that may be better."""
    best, bound_s = bracket.best, bracket.bound_s
    if not bracket.is_within(gap_goal) and clock.left_s() != 0:
        method = f"{method} + ilp"
        with clock.phase("ilp"):
            part = core(bracket)
            result = minimise_cost(part.problem, clock.left_s(), work_limit)
        if result.choice is not None:
            choice = part.lift(result.choice)
            found = Point(choice, reduced.problem.evaluate(choice))
            best = min(best, found, key=lambda point: point.totals.cost_s)
        if math.isfinite(result.bound):  # infinite: the ILP lost the known choice
            # Whatever the core leaves out is dearer than the best choice known.
            bound_s = max(bound_s, min(result.bound, best.totals.cost_s))
    open_bound_s = replace(bracket, best=best, bound_s=bound_s).open_bound_s
    return _finish(problem, reduced, best.choice, open_bound_s, method, clock)


def _core(problem: ChoiceProblem, plan: EliminationPlan, bracket: Bracket[Choice]) -> Reduced:
    """The part of `problem` that may be in a solution no dearer than the bracket's best; all of it
    where min-marginals need too much memory."""
    whole = Reduced.whole(problem)
    try:
        core = drop_forbidden(restrict(whole, keep_marks(problem, plan, bracket)))
    except TooWide:
        return whole
    assert core is not None, "the best choice known is in the core"
    return core


def _by_messages(minimiser: MessagePassing, clock: _Clock) -> Bracket[Choice] | Infeasible | None:
    """Message passing, at prices of bytes if the budget binds; None: it found no choice."""
    hull, budget_bytes = Hull(minimiser), minimiser.problem.budget_bytes
    with clock.phase("messages"):
        bound_s, fastest = hull.at(0.0)
    if math.isinf(bound_s):
        return FORBIDDEN
    bracket = Bracket(fastest, bound_s, 0.0)
    if budget_bytes is not None and not within(budget_bytes, fastest.totals.bytes):
        with clock.phase("leanest"):
            least_bytes, lean = minimiser.at(Weights(0.0, size=1.0))
        if not within(budget_bytes, lean.totals.bytes):
            is_leanest = lean.totals.bytes <= least_bytes * (1 + SAME_OPTIMUM_REL)
            return over_budget(budget_bytes, lean.totals.bytes) if is_leanest else None
        hull.corners.append(lean)
        with clock.phase("lagrangian"):
            bracket = search(hull, budget_bytes, clock.deadline)
    return None if math.isinf(bracket.best.totals.cost_s) else bracket


def _too_wide(
    problem: ChoiceProblem, reduced: Reduced, clock: _Clock, quick: TableLimits, gap_goal: float,
    work_limit: WorkLimit | None,
) -> Solution | Infeasible:  # fmt: skip
    """What no tables hold: messages, and the ILP for what they leave open."""
    sent = _by_messages(MessagePassing(reduced.problem, quick), clock)
    if sent is None:
        return _by_ilp(problem, reduced, clock, work_limit)
    if isinstance(sent, Infeasible):
        return sent
    whole = Reduced.whole(reduced.problem)
    return _closed(problem, reduced, sent, lambda _: whole, "messages", clock, gap_goal, work_limit)


def _by_ilp(
    problem: ChoiceProblem, reduced: Reduced, clock: _Clock, work_limit: WorkLimit | None
) -> Solution | Infeasible:
    """The reduced problem as an ILP, however many columns: no other solver is left."""
    work_limit = work_limit and replace(work_limit, n_columns=None)
    found = solve_ilp(reduced.problem, clock.left_s(), work_limit=work_limit)
    if isinstance(found, Infeasible):
        return found
    clock.phase_s.update(found.phase_s)
    bound_s = found.bound_s if found.gap > 0 else None
    return _finish(problem, reduced, found.choice, bound_s, "reduced ilp", clock)


def _finish(
    problem: ChoiceProblem,
    reduced: Reduced,
    choice: Choice,
    bound_s: float | None,
    method: str,
    clock: _Clock,
) -> Solution:
    return make_solution(problem, reduced.lift(choice), bound_s, method, clock.phase_s)
