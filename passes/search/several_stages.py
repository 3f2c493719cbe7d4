"""Pipelines as nodes: all plans of the joint search, and the Megatron pipelines.

Levels, each with a bound that holds for every pipeline:

    shared   every operator in equal shares on the devices of its stage, with the bubble, layers
             that do not divide evenly, and launches (`JointSearch.least_step_s`)
    layers   with what layers take at least on the best view, and what must run again at least to
             fit (`JointSearch.layered_step_s`)

After that, the pipelines that the joint search and the recipes propose are solved and simulated
(`passes/inter`). No tighter bound of the others is known, so that of all stays. Which pipelines are
solved is decided by scores, so nothing is proved of those that are not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import InfeasibleError
from autopar.passes.inter import Candidate, JointSearch, recipe_candidates
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.search.levels import Levels, Parts
from autopar.passes.search.recipes import SCORE_REL, RecipeNodes
from autopar.passes.search.refined import PRUNE_RATIO, refined_candidates
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.search.simulator import Solved

# Pipelines that are solved: per round of the joint search, and of recipes.
_N_SEARCHED, _N_RECIPES = 6, 3
# How far a simulated pipeline is below its score at most (relative): scores of small ones leave out
# how a stage's time divides into forward and backward (up to 4% was seen).
PIPELINE_SCORE_REL = SCORE_REL + 0.05


@dataclass
class SeveralStages:
    """The nodes of plans with at least two stages, or with exactly `n_stages`."""

    levels: Levels
    joint: JointSearch
    n_stages: int | None
    n_configurations: int = 0
    n_scored: int = 0

    def roots(self) -> list[Node]:
        """The recipes, and all plans."""
        least_s = self.joint.least_step_s(self.n_stages)
        every = Node("several stages", least_s, Simplicity(1, 2, stages=2), "shared", None)
        nodes = [replace(every, refine=partial(self._layered, every))]
        if self.n_stages is None:
            megatron = Node(
                "Megatron of several stages", least_s, Simplicity(0, 1, stages=2), "shared", None,
                recipe="Megatron",
            )  # fmt: skip
            nodes.append(replace(megatron, refine=self._recipes))
        return nodes

    def _recipes(self, limit_s: float) -> Parts:
        nodes = RecipeNodes(self.levels)
        evaluator = self.levels.simulator.evaluator
        return [
            replace(
                nodes.root(candidate.name, candidate.recipe, [candidate]),
                bound_s=candidate.estimate_s / (1 + PIPELINE_SCORE_REL),
            )
            for candidate in recipe_candidates(self.joint, None, _N_RECIPES, limit_s)
            if evaluator.stage_without_parameters(candidate.ends) is None
        ]

    def _layered(self, node: Node, limit_s: float) -> Parts:
        bound_s = self.joint.layered_step_s(self.n_stages, limit_s)
        known = node.after("layers", bound_s, None)
        if math.isinf(bound_s) and math.isfinite(limit_s):
            return [replace(known, note="none fits")]
        return [replace(known, refine=lambda _: self._estimated(known))]

    def _estimated(self, node: Node) -> Parts:
        """The estimate without a memory limit says when the search is worth its time."""
        estimate_s = self.joint.without_recompute.estimate_s(self.n_stages)
        refine = partial(self._searched, node)
        return [replace(node, level="estimated", refine=refine, estimate_s=estimate_s)]

    def _searched(self, node: Node, limit_s: float) -> Parts:
        """The plans of the joint search, then again with recompute if that may win."""
        whole = self.levels.simulator.evaluator
        plain = whole.without_recompute
        found = [*self._simulated(node, plain or whole, limit_s)]
        fastest_s = min((s.step_time_s for s in found), default=math.inf)
        limit_s = min(limit_s, fastest_s)
        if plain is not None and self.joint.recomputes and self.joint.unlimited_s < limit_s:
            found += self._simulated(node, whole, limit_s)
        note = "" if self.n_scored else "none found that fits"
        return [replace(node, level="searched", refine=None, note=note), *found]

    def _simulated(self, node: Node, evaluator: Evaluator, limit_s: float) -> Iterator[Solved]:
        simulator, scored = self.levels.simulator.on(evaluator), list[Scored]()
        every = list(_distinct_names(self._proposed(evaluator, limit_s, scored)))
        names = {_kind(candidate): candidate.name for candidate in every}
        for one in sorted(scored, key=lambda s: s.score_s):
            if one.score_s >= limit_s * (1 + PIPELINE_SCORE_REL):
                continue
            candidate = replace(one.candidate, name=names[_kind(one.candidate)])
            try:
                found = simulator.fit_to_budget(replace(one, candidate=candidate), limit_s)
            except InfeasibleError as error:
                self.levels.errors.append((error, candidate))
                continue
            if isinstance(found, Solved):
                limit_s = min(limit_s, found.step_time_s)
                yield found

    def _proposed(
        self, evaluator: Evaluator, limit_s: float, scored: list[Scored]
    ) -> Iterator[Candidate]:
        """Candidates of the joint search, with recompute if the evaluator has it."""
        is_whole = evaluator is self.levels.simulator.evaluator
        search = self.joint if is_whole else self.joint.without_recompute
        least_s = limit_s

        def score(candidate: Candidate) -> Scored | None:
            """None if the candidate does not fit or is pruned."""
            nonlocal least_s
            if candidate.estimate_s > PRUNE_RATIO * least_s:
                return None
            try:
                found = evaluator.scored(candidate, evaluator.budget_bytes)
            except InfeasibleError as error:
                self.levels.errors.append((error, candidate))
                return None
            scored.append(found)
            self.n_scored += 1
            least_s = min(least_s, found.score_s)
            return found

        yield from refined_candidates(
            search, self.n_stages, _N_SEARCHED, score, lambda: PRUNE_RATIO * least_s
        )
        self.n_configurations += search.n_configurations


def _kind(candidate: Candidate) -> object:
    views = tuple(layout.view for layout in candidate.stages)
    return candidate.ends, views, candidate.n_microbatches


def _distinct_names(candidates: Iterator[Candidate]) -> Iterator[Candidate]:
    """The candidates, with a suffix to the names of those that differ only in their cuts."""
    seen: Counter[str] = Counter()
    for candidate in candidates:
        seen[candidate.name] += 1
        nth = seen[candidate.name]
        yield candidate if nth == 1 else replace(candidate, name=f"{candidate.name}, cut {nth}")
