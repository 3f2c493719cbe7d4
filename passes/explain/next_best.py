"""What the options of one decision cost.

The options are every storage of a parameter, or every strategy of an operator. For each option,
everything else on the stage is chosen anew. With x the choices of the stage's problem
(`passes/intra/problem.py`) and v the variable that decides,

    cost of option k = min over x with x_v in k of the objective        (`Marginals`)

There is no memory limit here, because a budget would need a search per option. All that compute may
hide is hidden (`passes/intra/hiding.py`): what an option exposes is not in its cost. For the best
few options, x itself is found too: it says how a parameter is then used, and what is kept. If the
tables would be too large, all other operators and storages stay as in the plan (`_kept`).

A large program with repeated blocks is folded (`passes/analysis/folding.py`), so one block stands
for those that are left out. Its cost difference is that of any of them, unless it pays to change
many blocks for the sake of one. A decision on a value that many blocks read is priced in the whole
program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, BoolArray, Codes
from autopar.cost.laws import CostModel
from autopar.passes.analysis import KEPT, Analysis, Folded, find_runs, fold, place_in
from autopar.passes.intra import Constraints, IntraOpProblem, intra_op_problem
from autopar.passes.lowering import PlacedStage
from autopar.passes.search import depths
from autopar.passes.solvers.eliminate import (
    EliminationPlan,
    TableLimits,
    TooWide,
    min_marginals,
    minimise,
    plan_elimination,
)
from autopar.passes.solvers.problem import ChoiceProblem, Potentials, Weights
from autopar.plans import Choice, Decision, Option, PlanData, RestOfStage
from autopar.program.lines import OperatorStrategy, Storage, Strategy

N_SHOWN = 3
# Options within this share of the stage's cost are equally fast: the rest is ties and rounding.
AS_FAST_REL = 1e-9
# A stage with more operators is folded, because the whole would take more than a few seconds.
WHOLE_OPERATORS = 2000
# These limits allow some seconds; the defaults would allow ten and more.
LIMITS = TableLimits(table_entries=2**26, kept_entries=2**26, total_entries=2**30)


def decisions(
    stages: Sequence[PlacedStage],
    data: PlanData,
    name: str,
    limits: TableLimits = LIMITS,
    n_shown: int = N_SHOWN,
) -> tuple[Decision, ...]:
    """The decisions on a parameter, on every stage that has it, or on one operator.

    `name` is a parameter, an operator's key, or a module that runs one operator alone. There are no
    decisions for any other name.
    """
    found = []
    for k, stage in enumerate(stages):
        target = _target(stage.analysis, name)
        if target is not None:
            choice = None if data.is_manual else _choice(stage, k, data, target, limits, n_shown)
            if choice is not None and stage.strategy.recomputed:
                choice = replace(choice, runs_again=True)
            found.append(_decision(stage, k, target, choice, data.recipe))
    return tuple(found)


@dataclass(frozen=True)
class _Target:
    """A parameter or an operator: its placeholder or node, and its name in the plan."""

    node: str
    name: str
    is_parameter: bool


def _target(analysis: Analysis, name: str) -> _Target | None:
    program = analysis.program
    for node, info in program.parameters.items():
        if name in (info.name, *info.aliases):
            return _Target(node, info.name, True)
    keys = {o.name: program.keys[o.name] for o in analysis.operators}
    under = [(node, key) for node, key in keys.items() if key == name or key.startswith(f"{name}/")]
    return _Target(*under[0], False) if len(under) == 1 else None


def _decision(
    stage: PlacedStage, k: int, target: _Target, choice: Choice | None, recipe: str
) -> Decision:
    program, mesh, node = stage.analysis.program, stage.cost.mesh, target.node
    source = "" if target.is_parameter else program.sources.get(node, "unknown source")
    reading = [o.name for o in stage.analysis.operators if node in o.inputs]
    read_by = tuple(map(program.where, reading)) if target.is_parameter else ()
    return Decision(target.name, k, mesh.names, mesh.sizes, source, read_by, choice, recipe)


def _choice(
    stage: PlacedStage, k: int, data: PlanData, target: _Target, limits: TableLimits, n_shown: int
) -> Choice:
    depth = depths(data.schedule, data.devices, data.microbatches)[k]
    own: Storage | OperatorStrategy = (
        stage.strategy.storage[target.node]
        if target.is_parameter
        else stage.strategy.operators[target.node]
    )
    for analysis, node, blocks in _programs(stage.analysis, target.node):
        problem = stage_problem(analysis, stage.cost, data).under(None, depth)
        of = of_parameter if target.is_parameter else of_operator
        options = of(problem, node)
        try:
            marginals = Marginals.of(problem, every_choice(problem.numbers), limits)
        except TooWide:
            continue
        return marginals.choice(options, own, "anew", blocks, n_shown)
    marginals = Marginals.of(
        problem, _plan_choices(problem, stage.strategy, options), TableLimits()
    )
    return marginals.choice(options, own, "kept", blocks, n_shown)


def stage_problem(analysis: Analysis, cost: CostModel, data: PlanData) -> IntraOpProblem:
    limits = Constraints(frozenset(data.forbid))
    return intra_op_problem(analysis, cost, data.microbatches, limits, data.optimizer)


def _programs(
    analysis: Analysis, node: str
) -> Iterator[tuple[Analysis, str, tuple[int, int] | None]]:
    """The programs to price a decision in, the most exact first, as (program, node, blocks).

    These are the whole program, unless it is large, and the folded one. `node` is the name of
    the decision's node there; `blocks` is (blocks kept, all blocks), None for the whole.
    """
    folded = fold(analysis, find_runs(analysis))
    like = stand_in(folded, node)
    if like is None or len(analysis.operators) <= WHOLE_OPERATORS:
        yield analysis, node, None
    if like is not None:
        runs = folded.runs
        yield folded.analysis, like, (KEPT * len(runs), sum(run.count for run in runs))


def stand_in(folded: Folded, node: str) -> str | None:
    """The folded node that stands for an operator or parameter of the whole.

    None if no block was left out, or if many blocks read the parameter or the operator's outputs: a
    few blocks would not stand for so many readers.
    """
    if not folded.runs:
        return None
    operators, fewer = folded.whole.operators, folded.analysis.operators
    at = next((i for i, o in enumerate(operators) if o.name == node), None)
    if at is not None:
        like, values = fewer[folded.stands_for[at]].name, frozenset(operators[at].outputs)
    else:
        reader = next((i for i, o in enumerate(operators) if node in o.inputs), None)
        if reader is None:
            return node  # an unread parameter is in no block
        position = operators[reader].inputs.index(node)
        like, values = fewer[folded.stands_for[reader]].inputs[position], frozenset((node,))
    readers = (i for i, o in enumerate(operators) if values & {*o.inputs})
    blocks = {place_in(folded.runs, i) for i in readers} - {None}
    return like if len(blocks) < KEPT else None


@dataclass(frozen=True)
class DecisionOptions:
    """The options of a decision: what each decides, and which choices of `variable` decide so."""

    variable: int
    decided: tuple[Storage | OperatorStrategy, ...]
    choices: tuple[Codes, ...]
    parameter: str = ""


def of_parameter(problem: IntraOpProblem, name: str) -> DecisionOptions:
    storages = problem.storages[name]
    choices = tuple(np.array([i]) for i in range(len(storages)))
    return DecisionOptions(problem.parameter_variables[name], storages, choices, name)


def of_operator(problem: IntraOpProblem, name: str) -> DecisionOptions:
    """The options of an operator; choices of its group that place its tensors alike are one."""
    v = next(
        v
        for v, c in enumerate(problem.candidates)
        if any(member.name == name for member in c.group.members)
    )
    candidates = problem.candidates[v]
    operator = next(m.operator for m in candidates.group.members if m.name == name)
    codes = [candidates.specs(n).code for n in (*operator.inputs, *operator.outputs)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for choice, key in enumerate(zip(*(code.tolist() for code in codes), strict=True)):
        alike.setdefault(key, []).append(choice)
    choices = tuple(np.array(of) for of in alike.values())
    decided = tuple(candidates.strategies(int(of[0]))[name] for of in choices)
    return DecisionOptions(v, decided, choices)


def every_choice(numbers: ChoiceProblem) -> list[BoolArray]:
    return [np.ones(k, dtype=bool) for k in numbers.sizes]


def _plan_choices(
    problem: IntraOpProblem, plan: Strategy, options: DecisionOptions
) -> list[BoolArray]:
    """Per variable, a mask of the plan's choices.

    All choices stay of the variable that decides, and of those that only make readers agree.
    """
    keep, free = every_choice(problem.numbers), options.variable
    for v, candidates in enumerate(problem.candidates):
        for member in candidates.group.members if v != free else ():
            own, operator = plan.operators[member.name], member.operator
            names, specs = (*operator.inputs, *operator.outputs), (*own.inputs, *own.outputs)
            for value, spec in zip(names, specs, strict=True):
                column = candidates.specs(value)
                keep[v] &= np.array([s == spec for s in column.distinct], dtype=bool)[column.code]
    for name, v in problem.parameter_variables.items():
        if v != free:
            keep[v] &= np.array([s == plan.storage[name] for s in problem.storages[name]])
    for (side, value), v in problem.boundary_variables.items():
        column, crossing = problem.boundary_choices[side, value], getattr(plan, side)
        keep[v] &= np.array([column[i] == crossing.get(value) for i in range(len(column))])
    # An edited plan may have a choice that the search does not offer: its variable is left free.
    return [mask if mask.any() else ~mask for mask in keep]


class Ranked(NamedTuple):
    """An option that is possible: its place among `DecisionOptions.decided`, and what it costs more
    than the fastest; 0 if it is as fast."""

    option: int
    extra_s: float


def shown_of(others: Sequence[Ranked], n_shown: int) -> list[Ranked]:
    """The best few; if one is slower than the fastest, at least one such is among them."""
    shown, slower = list(others[:n_shown]), [one for one in others if one.extra_s > 0]
    if slower and slower[0] not in shown:
        shown[-1] = slower[0]
    return shown


@dataclass(frozen=True)
class Marginals:
    """The least cost of every choice of every variable (`costs_s`), of a problem without a memory
    limit. `kept` maps choices of `numbers` to those of `problem`."""

    problem: IntraOpProblem
    numbers: ChoiceProblem
    kept: tuple[Codes, ...]
    plan: EliminationPlan
    potentials: Potentials
    costs_s: Sequence[Array]

    @staticmethod
    def of(
        problem: IntraOpProblem, keep: Sequence[BoolArray], limits: TableLimits = LIMITS
    ) -> Marginals:
        """The marginals over the choices of `keep`.

        Raises `TooWide` if the tables would exceed `limits`.
        """
        numbers = problem.numbers.restrict(keep).merged()
        plan, potentials = plan_elimination(numbers, limits), Potentials.of(numbers, Weights())
        kept = tuple(np.flatnonzero(mask) for mask in keep)
        costs_s = min_marginals(plan, potentials)
        return Marginals(problem, numbers, kept, plan, potentials, costs_s)

    def ranked(self, options: DecisionOptions) -> list[Ranked]:
        """All possible options, fastest first."""
        costs_s = self.costs_s[options.variable]
        each_s = [float(costs_s[of].min()) for of in options.choices]
        least_s = min(each_s)
        extra_s = [s - least_s if s > least_s * (1 + AS_FAST_REL) else 0.0 for s in each_s]
        order = sorted(range(len(each_s)), key=lambda i: each_s[i])
        return [Ranked(i, extra_s[i]) for i in order if math.isfinite(each_s[i])]

    def choice(
        self,
        options: DecisionOptions,
        own: Storage | OperatorStrategy,
        rest: RestOfStage,
        blocks: tuple[int, int] | None,
        n_shown: int,
    ) -> Choice:
        ranked = self.ranked(options)
        if not ranked:
            return Choice(None, (), 0, 0, rest, blocks)
        chosen = next((one for one in ranked if options.decided[one.option] == own), None)
        is_fast = chosen is not None and not chosen.extra_s
        base = self._option(options, chosen.option if chosen and is_fast else ranked[0].option)

        def more(one: Ranked) -> Option:
            option = self._option(options, one.option)
            extra_s = option.extra_s - base.extra_s if one.extra_s else 0.0
            return replace(
                option, extra_s=extra_s, extra_bytes=option.extra_bytes - base.extra_bytes
            )

        return Choice(
            None if chosen is None else more(chosen),
            tuple(map(more, shown_of([one for one in ranked if one != chosen], n_shown))),
            len(ranked),
            sum(not one.extra_s for one in ranked),
            rest,
            blocks,
        )

    def _option(self, options: DecisionOptions, i: int) -> Option:
        """An option, with the totals of the fastest choice that has it."""
        v, decided = options.variable, options.decided[i]
        every = self.potentials.own
        own = np.full_like(every[v], np.inf)
        own[:, options.choices[i]] = every[v][:, options.choices[i]]
        potentials = Potentials.of_arrays(
            (*every[:v], own, *every[v + 1 :]), self.potentials.tables
        )
        _, choice = minimise(self.plan, potentials)
        totals = self.numbers.evaluate(choice)
        if not isinstance(decided, Storage):
            return Option(None, (), decided, totals.cost_s, totals.bytes)
        uses = dict.fromkeys(
            candidates.spec(int(self.kept[g][choice[g]]), options.parameter)
            for g, candidates in enumerate(self.problem.candidates)
            if options.parameter in candidates.group.inputs
        )
        return Option(decided, tuple(uses), None, totals.cost_s, totals.bytes)
