"""What all decisions of a plan were chosen over, at once; `next_best` says more of one of them.

One elimination of a stage gives the least cost of every choice of every variable (min-marginals).
So all options of all decisions are priced for the price of one. The stage is folded if it has
repeated blocks: one block stands for all, and what many blocks read is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.passes.analysis import find_runs, fold
from autopar.passes.explain.next_best import (
    AS_FAST_REL,
    LIMITS,
    N_SHOWN,
    Options,
    of_operator,
    of_parameter,
    stage_problem,
    stand_in,
)
from autopar.passes.intra import IntraOpProblem
from autopar.passes.lowering import PlacedStage
from autopar.passes.search import depths
from autopar.passes.solvers.eliminate import TooWide, min_marginals, plan_elimination
from autopar.passes.solvers.problem import Potentials, Weights
from autopar.plans import PlanData, RunnerUp
from autopar.program import OperatorStrategy, Storage

# Name of a parameter, or key of an operator -> its best options that the plan did not take.
RunnersUp = dict[str, tuple[RunnerUp, ...]]


def runners_up(
    stages: Sequence[PlacedStage], data: PlanData, n_shown: int = N_SHOWN
) -> list[RunnersUp]:
    """The next best options of every decision of each stage, fastest first.

    None of the user's recipe, which decides without prices; none of a stage whose tables are too
    large. Costs are those of `decisions`: without a memory limit.
    """
    if data.is_manual:
        return [{} for _ in stages]
    return [_of_stage(stage, k, data, n_shown) for k, stage in enumerate(stages)]


def _of_stage(stage: PlacedStage, k: int, data: PlanData, n_shown: int) -> RunnersUp:
    depth = depths(data.schedule, len(data.stages), data.microbatches)[k]
    folded = fold(stage.analysis, find_runs(stage.analysis))
    problem = stage_problem(folded.analysis, stage.cost, data).under(None, depth)
    numbers = problem.numbers.merged()
    try:
        plan = plan_elimination(numbers, LIMITS)
        marginals = min_marginals(plan, Potentials.of(numbers, Weights()))
    except TooWide:
        return {}
    ranked: dict[str, list[RunnerUp]] = {}

    def options_of(node: str, of: Callable[[IntraOpProblem, str], Options]) -> list[RunnerUp]:
        if node not in ranked:
            options = of(problem, node)
            ranked[node] = list(_ranked(options, marginals[options.variable]))
        return ranked[node]

    found: RunnersUp = {}
    program, strategy = stage.analysis.program, stage.strategy
    for operator, at in zip(stage.analysis.operators, folded.stands_for, strict=True):
        node = folded.analysis.operators[at].name
        every = options_of(node, of_operator)
        own: Storage | OperatorStrategy = strategy.operators[operator.name]
        found[program.keys[operator.name]] = _others(every, own, n_shown)
    for node, info in program.parameters.items():
        like = stand_in(folded, node) if folded.runs else node
        if like is not None and like in problem.storages:
            every = options_of(like, of_parameter)
            found[info.name] = _others(every, strategy.storage[node], n_shown)
    return found


def _ranked(options: Options, marginals: NDArray[np.float64]) -> Iterator[RunnerUp]:
    """All possible options, fastest first."""
    costs_s = [float(marginals[of].min()) for of in options.choices]
    least_s = min(costs_s)
    for i in sorted(range(len(costs_s)), key=lambda i: costs_s[i]):
        if np.isfinite(costs_s[i]):
            extra_s = costs_s[i] - least_s
            yield RunnerUp(options.decided[i], extra_s if extra_s > AS_FAST_REL * least_s else 0.0)


def _others(
    ranked: Sequence[RunnerUp], own: Storage | OperatorStrategy, n_shown: int
) -> tuple[RunnerUp, ...]:
    """The best others; if one is slower than the fastest, at least one such is among them."""
    others = [option for option in ranked if option.decided != own]
    shown, slower = others[:n_shown], [option for option in others if option.extra_s > 0]
    if slower and slower[0] not in shown:
        shown[-1] = slower[0]
    return tuple(shown)
