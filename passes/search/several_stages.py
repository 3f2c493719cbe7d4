"""Pipelines as nodes: those with each number of microbatches, and those of equal submeshes.

The first have two levels, each with a bound that holds for every pipeline:

    shared      every operator in equal shares on the devices of its stage, with the bubble, layers
                that do not divide evenly, and launches (`passes/inter/bounds.py`)
    stages      the span of the best plan by what is known of its stages. Each time the node is
                refined, one of these stages gets known better (`passes/inter/stage_search.py`)

Once all stages of the best plan are solved, it is simulated, and then the next one is the best.
Plans whose placements take too long are given up, but the bound counts them: other placements may
take as little as the solver's bound. So is the rest after many plans in vain.

Megatron pipelines are in this space, too. Their bounds are those of their own restricted stages.
Pipelines in other orders are of equal submeshes. There are thousands of them, so one node of each
source gives them out, the least bound first: by equal shares, by their layers, and by what the
stages of a device take within its memory (`passes/inter/recipes.py`). They
matter only if they are faster than a plan in the plain order by more than the tie. The rest ends
after `_MOST_PLACED_IN_VAIN` placements, or bounds of `_MOST_BOUNDED_IN_VAIN`, in vain.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autopar.errors import InfeasibleError
from autopar.passes.inter import (
    Candidate,
    EqualPipeline,
    PipelineOrder,
    PipelineSpace,
    Source,
    StageBound,
    StagePlan,
    StageSearch,
    equal_pipelines,
    fewest_chunks,
    has_plain_order,
    numbers_of_experts,
    other_orders,
    plain_order,
)
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.evaluator import Evaluator
from autopar.passes.search.levels import Levels, Parts
from autopar.passes.search.recipes import RecipeNodes
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Solved

# So many plans of a number of microbatches are solved in vain in a row: too slow, or too large by
# their peaks. Then the rest is given up. So it is once stages of so many variables were solved
# since a pipeline was the fastest plan: where launches and messages take longest, spans are far
# below. A Llama-70B on 128 GPUs solves 15 stages, a GPT-2 of two layers on 64 processes 1,500.
_MOST_IN_VAIN, _MOST_VARIABLES_IN_VAIN = 24, 6_000
# So many pipelines of equal submeshes are placed without a faster plan before the rest is given up.
# Where the solver places them it also chooses what runs again, and each counts four times.
_MOST_PLACED_IN_VAIN = 12
# Before, bounds are made until they cost so much. A bound by layers costs the distinct operators of
# the program, one by stages ten times as much: a Llama-70B has 174, a T5 522.
_MOST_BOUNDED_IN_VAIN, _COSTS = 80_000, (1, 10)
_PLACED_GIVEN_UP = f"given up after {_MOST_PLACED_IN_VAIN} pipelines in vain"
_NONE, _GIVEN_UP = "none fits", f"given up after {_MOST_IN_VAIN} plans in vain"
_STAGES_GIVEN_UP = f"given up after stages of {_MOST_VARIABLES_IN_VAIN} variables solved in vain"

# The levels of the bound of a pipeline of equal submeshes.
_SHARED, _LAYERS, _STAGES = range(3)
# A bound, its level, a number, the pipeline.
QueuedPipeline = tuple[float, int, int, EqualPipeline]


@dataclass
class _Effort:
    """What was done for pipelines of equal submeshes without a plan below `limit_s`. Before there
    is a plan, nothing is too much."""

    limit_s: float
    n_placed: int = 0
    n_bounded: int = 0

    @property
    def is_spent(self) -> bool:
        return self.n_placed >= _MOST_PLACED_IN_VAIN and math.isfinite(self.limit_s)

    def next_of(self, waiting: Sequence[QueuedPipeline], enough_s: float) -> QueuedPipeline | None:
        """The one with the least bound that may be placed, if that is below the limit, or gets a
        tighter bound, if that is not enough; None once enough was done."""
        able = (of for of in waiting if self._is_able(of, enough_s))
        return min(able, default=None)

    def _is_able(self, of: QueuedPipeline, enough_s: float) -> bool:
        if of[1] == _last_level(of[3]):
            return not self.is_spent and of[0] < self.limit_s
        is_cheap = self.n_bounded < _MOST_BOUNDED_IN_VAIN or math.isinf(self.limit_s)
        return is_cheap and of[0] < enough_s


def _last_level(pipeline: EqualPipeline) -> int:
    """Recipes have a price on their real machine alone."""
    return _LAYERS if pipeline.is_recipe else _STAGES


@dataclass
class SeveralStages:
    """The nodes of `space`. `n_configurations` are the stages that bounds were kept of."""

    levels: Levels
    space: PipelineSpace
    n_configurations: int = 0
    _are_recipes_known: bool = False
    _n_solved: int = 0
    _n_in_vain: int = 0  # variables of these, since a pipeline was the fastest plan
    _efforts: dict[str, _Effort] = field(default_factory=dict)

    def roots(self) -> Iterator[Node]:
        simplest = Simplicity.of_search(2)  # an axis in some stage, and the stages
        options = self._evaluator.options
        for m in self.space.counts if has_plain_order(options) else ():
            node = Node("several stages", self.space.least_step_s(m), simplest, "shared", None)
            if math.isfinite(node.bound_s):
                yield replace(node, refine=partial(self._begin, node, m))
            else:
                yield replace(node, note=_NONE)
        if self.space.n_stages is None and has_plain_order(options):
            yield from self.of_equal_stages(equal_pipelines(self.space, "Megatron"))

    def of_equal_stages(self, pipelines: list[EqualPipeline]) -> Iterator[Node]:
        """A node of each pipeline of equal submeshes."""
        for pipeline in pipelines:
            candidate = pipeline.candidate
            name = f"{pipeline.source} of several stages"
            name = candidate.name if pipeline.source == "manual" else name
            simplest = Simplicity.recipe_on(candidate)
            node = Node(name, pipeline.shared_s, simplest, "shared", None, recipe=candidate.recipe)
            yield replace(
                node, row=candidate.row, refine=partial(self._bound_by_layers, node, pipeline)
            )

    def other_pipelines(self, has_stages: bool, has_context: bool) -> Iterator[Node]:
        """The pipelines of equal submeshes that `roots` has not: those of other schedules, and, if
        the best plan `has_stages`, Megatron's with SP and ZeRO-1; with an axis cp or without.

        A node of each source gives out its pipelines best first. Megatron's in another
        schedule are tried if that is asked for; else the search of their views is enough.
        """
        options = self._evaluator.options
        if self.space.given:
            return
        orders = other_orders(options)
        asked = [] if has_plain_order(options) else orders
        if not self.space.analysis.program.training:
            orders = asked
        plain = self._plain_recipes if has_stages and not self._are_recipes_known else []
        sources: dict[Source, list[PipelineOrder]] = {"Megatron": asked, "search": orders}
        if not options.forbid & {"sequence", "zero1"}:
            sources["Megatron with SP and ZeRO-1"] = asked or plain
        for source, of_source in sources.items():
            every = equal_pipelines(self.space, source, of_source) if of_source else []
            pipelines = [of for of in every if ("cp" in of.view.axes) == has_context]
            if source == "search":
                pipelines = fewest_chunks(pipelines, options.tie)
            # Of schedules that nobody asked for, nothing is said unless the node is refined.
            yield from self._lazy_node(source, pipelines, source == "search" and not asked)

    def recipes(self) -> Iterator[Node]:
        """Megatron's pipelines with SP and ZeRO-1 in the usual order, as first incumbents; none of
        a mixture, of which they keep all experts on each data-parallel rank."""
        if numbers_of_experts(self.space.analysis):
            return
        self._are_recipes_known = True
        source: Source = "Megatron with SP and ZeRO-1"
        if not self._evaluator.options.forbid & {"sequence", "zero1"} and self._plain_recipes:
            pipelines = equal_pipelines(self.space, source, self._plain_recipes)
            yield from self._lazy_node(source, pipelines, is_silent=True)

    @cached_property
    def _recipes(self) -> RecipeNodes:
        return RecipeNodes(self.levels, slack_rel=0.0)

    @property
    def _plain_recipes(self) -> list[PipelineOrder]:
        """The usual order, if recipes may have it."""
        options = self._evaluator.options
        is_given = self.space.given or self.space.n_stages is not None
        is_searched = not is_given and has_plain_order(options)
        return [PipelineOrder(plain_order(options))] if is_searched else []

    def _lazy_node(
        self, source: Source, pipelines: Sequence[EqualPipeline], is_silent: bool
    ) -> Iterator[Node]:
        """A node of pipelines of one source; none if there are none."""
        if not pipelines:
            return
        least_s = dict[Hashable, float]()
        may_fit = [of for of in pipelines if of.may_fit]
        for of in may_fit:
            if of.shared_key not in least_s:
                least_s[of.shared_key] = of.shared_s
        waiting = [(least_s[of.shared_key], _SHARED, k, of) for k, of in enumerate(may_fit)]
        recipe = "Megatron" if pipelines[0].is_recipe else ""
        schedules = {of.order.schedule for of in pipelines}
        simplest = min(Simplicity.of_order(word, source != "search") for word in schedules)
        name, bound_s = f"{source} of several stages", min(least_s.values(), default=math.inf)
        node = Node(name, bound_s, simplest, "shared", None, recipe=recipe, is_silent=is_silent)
        refine = partial(self._next_of, node, waiting)
        yield replace(node, refine=refine) if waiting else replace(node, note=_NONE)

    def _next_of(self, node: Node, waiting: list[QueuedPipeline], limit_s: float) -> Parts:
        """The pipeline with the least bound on its last level, and those that are left."""
        effort, parts = self._effort(node, limit_s), list[Node | Solved]()
        while not parts and (of := effort.next_of(waiting, self._enough_s(limit_s))) is not None:
            self._evaluator.limit.check()
            waiting.remove(of)
            bound_s, level, k, pipeline = of
            if level == _last_level(pipeline):
                parts.append(self._unplaced(node, bound_s, pipeline))
                continue
            if pipeline.is_recipe and self._recipes.rule_out(pipeline.candidate):
                continue
            effort.n_bounded += _COSTS[level] * self.space.layer_bounds.n_distinct
            tighter_s = self._tighter_s(pipeline, level, self._enough_s(limit_s))
            waiting.append((max(bound_s, tighter_s), level + 1, k, pipeline))
        least_s = min((of[0] for of in waiting), default=math.inf)
        if math.isinf(least_s):
            return [*parts, replace(node.after("layers", math.inf, None), note=_NONE)]
        again = node.after("layers", least_s, partial(self._next_of, node, waiting))
        if not parts and least_s < limit_s:
            again = replace(again, refine=None, note=_PLACED_GIVEN_UP)
        return [*parts, again]

    def _enough_s(self, limit_s: float) -> float:
        """A bound is made no better above these seconds. Plans in other orders matter below
        `limit_s`, which is a tie below the best step; bounds, up to the tolerance."""
        options = self._evaluator.options
        more = max(0.0, (1 + options.tie) * (1 - options.tolerance) - 1)
        return limit_s * (1 + more) if options.schedule == "auto" else limit_s

    def _tighter_s(self, pipeline: EqualPipeline, level: int, enough_s: float) -> float:
        """The bound of the next level."""
        if level == _SHARED:
            return pipeline.layered_s
        stage_s = partial(self._evaluator.priced_stage_s, pipeline.candidate)
        try:
            return pipeline.staged_s(stage_s, enough_s)
        except InfeasibleError:  # its placements say why
            return 0.0

    def _effort(self, node: Node, limit_s: float) -> _Effort:
        """What was done in vain for recipes, or else; less than a tie faster is in vain, too."""
        known = self._efforts.get(node.recipe)
        if known is None or known.limit_s > limit_s * (1 + self._evaluator.options.tie):
            known = self._efforts[node.recipe] = _Effort(limit_s)
        known.limit_s = limit_s
        return known

    def _unplaced(self, node: Node, bound_s: float, pipeline: EqualPipeline) -> Node:
        """The node of one pipeline."""
        candidate = pipeline.candidate
        if not pipeline.is_recipe:
            simplest = Simplicity.searched_on(candidate)
            found = Node(candidate.name, bound_s, simplest, "priced", None)
            return replace(found, refine=partial(self._search_placements, found, pipeline))
        recipe = self._recipes.root([candidate])
        found = replace(recipe, bound_s=bound_s, row=candidate.row, level="layers")
        return replace(found, refine=partial(self._place, found, recipe))

    def _search_placements(self, node: Node, pipeline: EqualPipeline, limit_s: float) -> Parts:
        """A pipeline's placements, simulated if they may be faster. It stays for its bound."""
        effort = self._effort(node, limit_s)
        if effort.is_spent:
            return [replace(node, refine=None, note=_PLACED_GIVEN_UP)]
        effort.n_placed += 4
        candidate, evaluator = pipeline.candidate, self._evaluator
        try:
            placed = evaluator.placed(candidate, evaluator.budget_bytes)
        except InfeasibleError as error:
            return self.levels.impossible(error, candidate)
        # How stages of a device divide its budget is a guess, so only what none limits is a bound.
        free = evaluator.placed(candidate, None) if candidate.has_chunks else placed
        bound_s, least_s = (
            pipeline.solved_s(np.array(whole_s), np.array([chosen.once_s for chosen in choices]))
            for whole_s, choices in (
                ([chosen.bound_s for chosen in free.choices], free.choices),
                ([chosen.objective_s for chosen in placed.choices], placed.choices),
            )
        )
        known = node.after("solved", bound_s, None)
        if least_s >= limit_s:
            return [known]
        try:
            found = self.levels.simulator.fit_to_budget(placed, limit_s)
        except InfeasibleError as error:
            return self.levels.impossible(error, candidate)
        return [known, found] if isinstance(found, Solved) else [known]

    def _place(self, node: Node, recipe: Node, limit_s: float) -> Parts:
        """A recipe's placements."""
        effort = self._effort(node, limit_s)
        if effort.is_spent:
            return [replace(node, refine=None, note=_PLACED_GIVEN_UP)]
        assert recipe.refine is not None, "a root is refined"
        found = recipe.refine(limit_s)
        effort.n_placed += bool(found)
        return found

    def _bound_by_layers(self, node: Node, pipeline: EqualPipeline, limit_s: float) -> Parts:
        candidate = pipeline.candidate
        if pipeline.is_recipe and self._recipes.rule_out(candidate):
            return []
        recipe = self._recipes.root([candidate])
        bound_s = max(node.bound_s, pipeline.layered_s)
        if bound_s >= limit_s:  # its name would be one of many
            return [node.after("layers", bound_s, recipe.refine)]
        return [replace(recipe, bound_s=bound_s, row=node.row)]

    def _begin(self, node: Node, m: int, limit_s: float) -> Parts:
        options = self._evaluator.options
        # No plan that matters later takes longer (`BranchAndBound`).
        most_s = limit_s * (1 + options.tie) / (1 - options.tolerance)
        search = StageSearch(self.space, m, most_s)
        self.n_configurations += search.n_stages
        return self._refine(node, search, limit_s)

    def _refine(self, node: Node, search: StageSearch, limit_s: float) -> Parts:
        again, solve = partial(self._refine, node, search), partial(self.solved, limit_s=limit_s)
        if self._n_in_vain > _MOST_VARIABLES_IN_VAIN:
            return [replace(node, refine=None, note=_STAGES_GIVEN_UP)]
        n_solved = self._n_solved
        for plan in search.plans(limit_s):
            known = node.after("stages", search.least_s, again)
            known = replace(known, simplest=self._simplest(search, plan))
            if search.tighten(plan, solve):
                # The first that gets so far may be an early incumbent.
                is_first = not n_solved and self._n_solved
                if not (is_first and search.solve_all(plan, solve, limit_s)):
                    return [known]
            found = self._simulate(search.space.candidate(search.m, plan.stages), limit_s)
            if found is not None:
                search.given_up_s = min(search.given_up_s, search.least_of(plan.stages))
            solved = [found] if isinstance(found, Solved) else []
            if any(one.step_time_s < limit_s for one in solved):
                search.n_in_vain = self._n_in_vain = 0
            else:
                search.n_in_vain += 1
            if search.n_in_vain >= _MOST_IN_VAIN:
                return [replace(known, refine=None, note=_GIVEN_UP), *solved]
            if solved:
                return [known, *solved]
        if math.isinf(search.least_s):
            return [replace(node.after("stages", math.inf, None), note=_NONE)]
        known = node.after("stages", search.least_s, again)
        return [replace(known, given_up_s=search.bound_s)]

    def _simplest(self, search: StageSearch, plan: StagePlan) -> Simplicity:
        """What the best plan may be; that others are simpler is found by chance."""
        return Simplicity.searched_on(search.space.candidate(search.m, plan.stages))

    def solved(self, candidate: Candidate, stage: int, limit_s: float = math.inf) -> StageBound:
        """What a stage takes at least by its own problem; not settled if that is `limit_s`."""
        self._n_solved += 1
        try:
            chosen = self._evaluator.solved_stage(candidate, stage, limit_s)
        except InfeasibleError as error:
            if error.least_bytes is not None:  # else the constraints: nothing can be said of one
                self.levels.impossible(error, candidate)
            return StageBound(math.inf, math.inf)
        self._n_in_vain += chosen.n_variables
        if not chosen.settled:
            return StageBound(max(chosen.bound_s, limit_s), 0.0, is_settled=False)
        whole_s, once_s = chosen.bound_s, chosen.once_s
        return StageBound(whole_s, max(0.0, whole_s - once_s), once_s)

    def _simulate(self, candidate: Candidate, limit_s: float) -> Solved | float | None:
        """A solved pipeline, or seconds that none of its steps was found below; None if none fits.

        The seconds are at least `limit_s`.
        """
        placed = self._evaluator.placed(candidate, self._evaluator.budget_bytes)
        if placed.least_s >= limit_s:
            return placed.least_s
        try:
            return self.levels.simulator.fit_to_budget(placed, limit_s)
        except InfeasibleError as error:
            self.levels.impossible(error, candidate)
            return None

    @property
    def _evaluator(self) -> Evaluator:
        return self.levels.simulator.evaluator
