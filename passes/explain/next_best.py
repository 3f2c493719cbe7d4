"""What the alternatives of one decision cost: every storage of a parameter, or every strategy of an
operator, with everything else of its stage chosen anew.

With x the choices of the stage's problem (`problem.py`) and v the variable that decides,

    cost of option k = min over x with x_v in k of the objective        (`_Marginals`)

without a memory limit: a budget would need a search per option. Of the best few the least x is
found too, which says how a parameter is used then, and what is kept. Where tables would be too
large, all other operators and storages stay as the plan has them (`_kept`).

Of a program of many operators with repeated blocks, the problem is that of the same with few of
them (`folding.py`), of which one stands for those that are left out: its own difference is theirs
unless it is worth to change many blocks for one. What many blocks read is weighed in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.passes.analysis import KEPT, Analysis, Folded, find_runs, fold
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
from autopar.plans import Choice, Decision, Option, PlanData, Rest
from autopar.program import OperatorStrategy, Storage, Strategy

N_SHOWN = 3
# Among choices that cost the same, those of least tie: weighed at this much of the cost.
TIE_REL = 1e-12
# Of the stage's cost; less is ties and rounding, and no reason.
AS_FAST_REL = 1e-9
# Of a stage of more operators, where the whole takes more than a few seconds, few of its repeated
# blocks are weighed.
WHOLE_OPERATORS = 2000
# Some seconds, where the defaults allow for ten and more.
LIMITS = TableLimits(table_entries=2**26, kept_entries=2**26, total_entries=2**30, branches=64)
_SEARCHED = ("data parallel on ", "ZeRO-3 on ", "Megatron")
Indices = NDArray[np.intp]


def decisions(
    stages: Sequence[PlacedStage],
    data: PlanData,
    name: str,
    limits: TableLimits = LIMITS,
    n_shown: int = N_SHOWN,
) -> tuple[Decision, ...]:
    """What was decided of a parameter, on every stage that has it, or of one operator: by its key,
    or by a module that runs no other. Of what is neither, nothing."""
    found = []
    for k, stage in enumerate(stages):
        target = _target(stage.analysis, name)
        if target is not None:
            recipe = recipe_of(data.chosen)
            choice = None if recipe else _choice(stage, k, data, target, limits, n_shown)
            if choice is not None and stage.strategy.recomputed:
                choice = replace(choice, runs_again=True)
            found.append(_decision(stage, k, target, choice, recipe))
    return tuple(found)


@dataclass(frozen=True)
class _Target:
    """A parameter (its placeholder), or an operator (its node); `name` as in the plan."""

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


def recipe_of(chosen: str) -> str:
    """The recipe that a plan's candidate was laid out by; nothing for a search."""
    if chosen.startswith("manual recipe"):
        return "manual=Manual(...)"
    return chosen if chosen.startswith(_SEARCHED) else ""


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
    depth = depths(data.schedule, len(data.stages), data.microbatches)[k]
    own: Storage | OperatorStrategy = (
        stage.strategy.storage[target.node]
        if target.is_parameter
        else stage.strategy.operators[target.node]
    )
    for analysis, node, blocks in _programs(stage.analysis, target.node):
        problem = _problem(analysis, stage.cost, data).under(None, depth)
        of = _of_parameter if target.is_parameter else _of_operator
        options = of(problem, node)
        try:
            weighed = _Marginals.of(problem, options, _all(problem.numbers), limits)
        except TooWide:
            continue
        return weighed.choice(own, "anew", blocks, n_shown)
    kept = _kept(problem, stage.strategy, options.variable)
    return _Marginals.of(problem, options, kept, TableLimits()).choice(own, "kept", blocks, n_shown)


def _problem(analysis: Analysis, cost: CostModel, data: PlanData) -> IntraOpProblem:
    limits = Constraints(frozenset(data.forbid))
    try:
        return intra_op_problem(analysis, cost, data.microbatches, limits, data.optimizer)
    finally:
        analysis.priced.clear()


def _programs(
    analysis: Analysis, node: str
) -> Iterator[tuple[Analysis, str, tuple[int, int] | None]]:
    """The programs to weigh a decision in, the most exact first: the whole unless it is large, and
    the same with few of its blocks; its name there, and how many blocks of how many."""
    folded = fold(analysis, find_runs(analysis))
    like = _stand_in(folded, node)
    if like is None or len(analysis.operators) <= WHOLE_OPERATORS:
        yield analysis, node, None
    if like is not None:
        runs = folded.runs
        yield folded.analysis, like, (KEPT * len(runs), sum(run.count for run in runs))


def _stand_in(folded: Folded, node: str) -> str | None:
    """What stands for an operator or parameter of the whole; None where no block was left out, or
    many blocks read the parameter or what the operator makes: few would not stand for them."""
    if not folded.runs:
        return None
    operators, fewer = folded.whole.operators, folded.analysis.operators
    at = next((i for i, o in enumerate(operators) if o.name == node), None)
    if at is not None:
        like, values = fewer[folded.stands_for[at]].name, frozenset(operators[at].outputs)
    else:
        reader = next((i for i, o in enumerate(operators) if node in o.inputs), None)
        if reader is None:
            return node  # what nobody reads is in no block
        position = operators[reader].inputs.index(node)
        like, values = fewer[folded.stands_for[reader]].inputs[position], frozenset((node,))
    readers = (i for i, o in enumerate(operators) if values & {*o.inputs})
    blocks = {
        (r, (i - run.start) // run.period)
        for i in readers
        for r, run in enumerate(folded.runs)
        if run.start <= i < run.end
    }
    return like if len(blocks) < KEPT else None


@dataclass(frozen=True)
class _Options:
    """Per option what it decides, and the choices of the `variable` that are it."""

    variable: int
    decided: tuple[Storage | OperatorStrategy, ...]
    choices: tuple[Indices, ...]
    parameter: str = ""


def _of_parameter(problem: IntraOpProblem, name: str) -> _Options:
    storages = problem.storages[name]
    choices = tuple(np.array([i]) for i in range(len(storages)))
    return _Options(problem.parameter_variables[name], storages, choices, name)


def _of_operator(problem: IntraOpProblem, name: str) -> _Options:
    """Choices of its group that place the operator's own tensors alike are one option."""
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
    return _Options(v, decided, choices)


def _all(numbers: ChoiceProblem) -> list[NDArray[np.bool_]]:
    return [np.ones(k, dtype=bool) for k in numbers.sizes]


def _kept(problem: IntraOpProblem, plan: Strategy, free: int) -> list[NDArray[np.bool_]]:
    """Per variable the choices that are the plan's; all of the `free` one, and of those that only
    say how readers agree."""
    keep = _all(problem.numbers)
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
    # What the search does not offer, an edited plan may have: it is left free.
    return [mask if mask.any() else ~mask for mask in keep]


@dataclass(frozen=True)
class _Marginals:
    """Every option's least cost; `kept` lifts choices of `numbers` to those of the problem."""

    problem: IntraOpProblem
    options: _Options
    numbers: ChoiceProblem
    kept: tuple[Indices, ...]
    plan: EliminationPlan
    potentials: Potentials
    least_s: tuple[float, ...]

    @staticmethod
    def of(
        problem: IntraOpProblem,
        options: _Options,
        keep: Sequence[NDArray[np.bool_]],
        limits: TableLimits,
    ) -> _Marginals:
        """Raises `TooWide` where tables would exceed `limits`."""
        numbers = problem.numbers.restrict(keep).merged()
        plan = plan_elimination(numbers, limits)
        optimum_s, _ = minimise(plan, Potentials.of(numbers, Weights()))
        tie = TIE_REL * optimum_s if math.isfinite(optimum_s) else 0.0
        potentials = Potentials.of(numbers, Weights(tie=tie))
        marginals = min_marginals(plan, potentials)[options.variable]
        least_s = tuple(float(marginals[of].min()) for of in options.choices)
        kept = tuple(np.flatnonzero(mask) for mask in keep)
        return _Marginals(problem, options, numbers, kept, plan, potentials, least_s)

    def choice(
        self,
        own: Storage | OperatorStrategy,
        rest: Rest,
        blocks: tuple[int, int] | None,
        n_shown: int,
    ) -> Choice:
        possible = [i for i, cost_s in enumerate(self.least_s) if math.isfinite(cost_s)]
        if not possible:
            return Choice(None, (), 0, 0, rest, blocks)
        least_s = min(self.least_s) * (1 + AS_FAST_REL)
        ranked = sorted(possible, key=lambda i: self.least_s[i])
        as_fast = [i for i in ranked if self.least_s[i] <= least_s]
        chosen = next((i for i in ranked if self.options.decided[i] == own), None)
        others = [i for i in ranked if i != chosen]
        slower = [i for i in others if i not in as_fast]
        shown = others[:n_shown]
        if slower and slower[0] not in shown:
            shown[-1] = slower[0]
        base = self._option(chosen if chosen in as_fast else ranked[0])

        def more(i: int) -> Option:
            option = self._option(i)
            extra_s = 0.0 if i in as_fast else option.extra_s - base.extra_s
            return replace(
                option, extra_s=extra_s, extra_bytes=option.extra_bytes - base.extra_bytes
            )

        return Choice(
            None if chosen is None else more(chosen),
            tuple(more(i) for i in shown),
            len(possible),
            len(as_fast),
            rest,
            blocks,
        )

    def _option(self, i: int) -> Option:
        """An option with what all of the fastest choice with it costs."""
        v, decided = self.options.variable, self.options.decided[i]
        every = self.potentials.own
        own = np.full_like(every[v], np.inf)
        own[:, self.options.choices[i]] = every[v][:, self.options.choices[i]]
        potentials = Potentials.given((*every[:v], own, *every[v + 1 :]), self.potentials.tables)
        _, choice = minimise(self.plan, potentials)
        totals = self.numbers.evaluate(choice)
        if not isinstance(decided, Storage):
            return Option(None, (), decided, totals.cost_s, totals.bytes)
        name = self.options.parameter
        uses = dict.fromkeys(
            candidates.spec(int(self.kept[g][choice[g]]), name)
            for g, candidates in enumerate(self.problem.candidates)
            if name in candidates.group.inputs
        )
        return Option(decided, tuple(uses), None, totals.cost_s, totals.bytes)
