"""What all decisions of a plan were chosen over, at once; `next_best` says more of one of them.

One elimination of a stage gives the least cost of every choice of every variable (min-marginals).
So all options of all decisions are priced for the price of one. The stage is folded if it has
repeated blocks: one block stands for all, and what many blocks read is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.passes.analysis import find_runs, fold
from autopar.passes.explain.next_best import (
    N_SHOWN,
    DecisionOptions,
    Marginals,
    Ranked,
    every_choice,
    of_operator,
    of_parameter,
    shown_of,
    stage_problem,
    stand_in,
)
from autopar.passes.intra import IntraOpProblem
from autopar.passes.lowering import PlacedStage
from autopar.passes.search import depths
from autopar.passes.solvers.eliminate import TooWide
from autopar.plans import PlanData, RunnerUp
from autopar.program.lines import OperatorStrategy, Storage

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
    depth = depths(data.schedule, data.devices, data.microbatches)[k]
    folded = fold(stage.analysis, find_runs(stage.analysis))
    problem = stage_problem(folded.analysis, stage.cost, data).under(None, depth)
    try:
        marginals = Marginals.of(problem, every_choice(problem.numbers))
    except TooWide:
        return {}
    ranked: dict[str, list[tuple[Ranked, RunnerUp]]] = {}

    def others(
        node: str,
        of: Callable[[IntraOpProblem, str], DecisionOptions],
        own: Storage | OperatorStrategy,
    ) -> tuple[RunnerUp, ...]:
        if node not in ranked:
            options = of(problem, node)
            ranked[node] = [
                (one, RunnerUp(options.decided[one.option], one.extra_s))
                for one in marginals.ranked(options)
            ]
        of_option = {one: option for one, option in ranked[node] if option.decided != own}
        return tuple(of_option[one] for one in shown_of([*of_option], n_shown))

    found: RunnersUp = {}
    program, strategy = stage.analysis.program, stage.strategy
    for operator, at in zip(stage.analysis.operators, folded.stands_for, strict=True):
        node, own = folded.analysis.operators[at].name, strategy.operators[operator.name]
        found[program.keys[operator.name]] = others(node, of_operator, own)
    for node, info in program.parameters.items():
        like = stand_in(folded, node) if folded.runs else node
        if like is not None and like in problem.storages:
            found[info.name] = others(like, of_parameter, strategy.storage[node])
    return found
