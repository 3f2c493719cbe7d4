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
source and schedule gives them out, the least bound first: by equal shares, then by their layers
(`passes/inter/recipes.py`). They are searched if the user asks for the schedule. After
`_MOST_PLACED_IN_VAIN` of them without a faster plan, the rest is given up.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import groupby

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
    has_plain_order,
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
_MOST_PLACED_IN_VAIN = 12
_PLACED_GIVEN_UP = f"given up after {_MOST_PLACED_IN_VAIN} pipelines in vain"
_NONE, _GIVEN_UP = "none fits", f"given up after {_MOST_IN_VAIN} plans in vain"
_STAGES_GIVEN_UP = f"given up after stages of {_MOST_VARIABLES_IN_VAIN} variables solved in vain"

# A bound, whether it is that of its layers, a number, the pipeline.
QueuedPipeline = tuple[float, bool, int, EqualPipeline]


@dataclass
class SeveralStages:
    """The nodes of `space`. `n_configurations` are the stages that bounds were kept of."""

    levels: Levels
    space: PipelineSpace
    n_configurations: int = 0
    _n_solved: int = 0
    _n_in_vain: int = 0  # variables of these, since a pipeline was the fastest plan
    _limit_s: float = math.inf
    _n_placed_in_vain: int = 0

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

    def other_pipelines(self, has_context: bool) -> Iterator[Node]:
        """The pipelines of equal submeshes that `roots` has not: those of other schedules, and
        Megatron's with SP and ZeRO-1; with an axis cp or without, each given up by itself.

        A node of each source and schedule gives out its pipelines best first.
        """
        options = self._evaluator.options
        self._n_placed_in_vain = 0
        if self.space.given:
            return
        orders = other_orders(options)
        plain = [PipelineOrder(plain_order(options))] if self.space.n_stages is None else []
        sources: dict[Source, list[PipelineOrder]] = {"Megatron": orders, "search": orders}
        if not options.forbid & {"sequence", "zero1"}:
            sources["Megatron with SP and ZeRO-1"] = orders or plain
        for source, of_source in sources.items():
            for schedule, alike in groupby(of_source, lambda order: order.schedule):
                every = equal_pipelines(self.space, source, [*alike])
                if pipelines := [of for of in every if ("cp" in of.view.axes) == has_context]:
                    yield self._lazy_node(f"{source} of several stages", schedule, pipelines)

    def _lazy_node(self, name: str, schedule: str, pipelines: Sequence[EqualPipeline]) -> Node:
        """A node of pipelines of one source and schedule."""
        least_s = dict[Hashable, float]()
        for of in pipelines:
            if of.shared_key not in least_s:
                least_s[of.shared_key] = of.shared_s
        waiting = [(least_s[of.shared_key], False, k, of) for k, of in enumerate(pipelines)]
        heapify(waiting)
        is_recipe = pipelines[0].is_recipe
        simplest = Simplicity.of_order(schedule, is_recipe)
        recipe = "Megatron" if is_recipe else ""
        node = Node(name, waiting[0][0], simplest, "shared", None, recipe=recipe)
        return replace(node, refine=partial(self._next_of, node, waiting))

    def _next_of(self, node: Node, waiting: list[QueuedPipeline], limit_s: float) -> Parts:
        """The pipeline with the least bound by its layers, and those that are left."""
        if self._is_in_vain(limit_s):
            return [replace(node, refine=None, note=_PLACED_GIVEN_UP)]
        parts = list[Node | Solved]()
        while waiting and waiting[0][0] < limit_s and not parts:
            bound_s, is_layered, k, pipeline = heappop(waiting)
            if not is_layered:
                heappush(waiting, (max(bound_s, pipeline.layered_s), True, k, pipeline))
                continue
            candidate = pipeline.candidate
            recipe = RecipeNodes(self.levels, slack_rel=0.0).root([candidate])
            found = replace(recipe, bound_s=bound_s, row=candidate.row, level="layers")
            parts.append(replace(found, refine=partial(self._place, found, recipe)))
        if waiting:
            again = partial(self._next_of, node, waiting)
            parts.append(node.after("layers", waiting[0][0], again))
        return parts

    def _place(self, node: Node, recipe: Node, limit_s: float) -> Parts:
        """A pipeline's placements."""
        if self._is_in_vain(limit_s):
            return [replace(node, refine=None, note=_PLACED_GIVEN_UP)]
        assert recipe.refine is not None, "a root is refined"
        found = recipe.refine(limit_s)
        self._n_placed_in_vain += bool(found)
        return found

    def _is_in_vain(self, limit_s: float) -> bool:
        """Were many pipelines placed since the last faster plan?"""
        if limit_s < self._limit_s:
            self._limit_s, self._n_placed_in_vain = limit_s, 0
        return self._n_placed_in_vain >= _MOST_PLACED_IN_VAIN

    def _bound_by_layers(self, node: Node, pipeline: EqualPipeline, limit_s: float) -> Parts:
        candidate = pipeline.candidate
        nodes = RecipeNodes(self.levels, slack_rel=0.0)
        recipe = nodes.root([candidate])
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
