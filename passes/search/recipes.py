"""The plain recipes as nodes: what a person would try first, and the first incumbents.

    data parallel, ZeRO-1, 2, 3      every axis splits the batch
    Megatron                         dp x tp, on every view of two axes
    Megatron, SP and ZeRO-1 or 3     the same with activations split between matmuls, and shards

A recipe is tried with the fewest microbatches that fit, first without recompute, then with
selective and with full recompute. Its placements are in the search's space, too, so a recipe bounds
nothing: its node's bound is that of its own placements.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from autopar.errors import InfeasibleError, NotSupportedError
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import microbatch_counts
from autopar.passes.inter import Candidate, StageLayout, axes_text, n_operators
from autopar.passes.intra import Constraints, Role, too_little_memory
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.evaluator import Evaluator, Placed
from autopar.passes.search.levels import Levels, Parts
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.solvers.problem import within

# How far a simulated step is below what its placements take at least (`Placed.least_s`), relative,
# for what `passes/analysis/gathering.py` says. `tests/search/test_simulator.py` measures it.
SLACK_REL = 0.02
_MODES = ("selective", "full")


@dataclass(frozen=True)
class Recipe:
    """A recipe on one view: `family` is its plain name, `name` says all."""

    family: str
    name: str
    layout: StageLayout


def recipes_on(
    views: Sequence[LogicalMesh], forbid: frozenset[str], has_batch: bool, fixes_degrees: bool
) -> Iterator[Recipe]:
    """The recipes of one stage, without those that `forbid` excludes."""
    views = [v for v in views if v.active_axes and has_batch]
    plain = [v for v in views if not (fixes_degrees and v.axes["tp"] > 1)]
    for view in plain[:1]:  # for data parallelism all views are the same
        data: Role = "data"
        for zero, family in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
            if not forbid & {"data", f"zero{zero}"}:
                limits = Constraints(forbid, (data,) * view.n_axes, zero)
                name = f"{family} on {axes_text(view)}"
                yield Recipe(family, name, StageLayout(view, limits))
    for view in views:
        splits_batch = view.sizes[0] > 1
        if view.n_axes != 2 or view.sizes[1] == 1 or "tensor" in forbid:
            continue
        if splits_batch and "data" in forbid:
            continue
        roles: tuple[Role, ...] = ("data", "tensor")
        limits = Constraints(forbid | {"sequence"}, roles, 0)
        yield Recipe("Megatron", f"Megatron on {axes_text(view)}", StageLayout(view, limits))
        for zero in (1, 3) if splits_batch else (0,):
            if not forbid & {"sequence", f"zero{zero}"}:
                limits = Constraints(forbid, roles, zero)
                with_zero = f" and ZeRO-{zero}" if zero else ""
                name = f"Megatron with SP{with_zero} on {axes_text(view)}"
                yield Recipe("Megatron", name, StageLayout(view, limits))


@dataclass(frozen=True)
class RecipeNodes:
    """Makes the nodes of recipes. Steps are at most so far below what their placements take."""

    levels: Levels
    slack_rel: float = SLACK_REL

    def root(self, name: str, recipe: str, attempts: Sequence[Candidate]) -> Node:
        """A recipe, with candidates in the order in which they are tried."""
        node = Node(name, 0.0, Simplicity.recipe_on(attempts[0]), "recipe", None, recipe=recipe)
        return node.after("recipe", 0.0, lambda _: self._free(node, attempts))

    def counted(self, recipe: Recipe) -> Node:
        """A recipe of one stage, with every number of microbatches worth trying."""
        evaluator, layout = self.levels.simulator.evaluator, recipe.layout
        n_splits = math.prod(
            size
            for axis, size in enumerate(layout.view.sizes)
            if layout.constraints.role(axis) == "data"
        )
        analysis = evaluator.analysis
        counts = microbatch_counts(analysis, evaluator.options, layout.view.n_ranks, n_splits)
        ends = (n_operators(analysis.program),)
        attempts = [
            Candidate(recipe.name, ends, (layout,), m, recipe=recipe.family) for m in counts
        ]
        return self.root(recipe.name, recipe.family, attempts)

    def _free(self, node: Node, attempts: Sequence[Candidate]) -> Parts:
        """As if memory had no limit: fewest microbatches, nothing runs again. No attempt is faster.

        Sizes are checked before, so that what is too large is not solved.
        """
        small = self._small(attempts)
        first = next(small, None)
        if first is None:
            evaluator = self._evaluators[-1]
            least_bytes = evaluator.size_bound_bytes(attempts[-1])
            error = too_little_memory(evaluator.budget_bytes, least_bytes, attempts[-1].name)
            self.levels.errors.append((error, attempts[-1]))
            return []
        evaluator, candidate = self._evaluators[0], attempts[0]
        try:
            free = evaluator.placed(candidate, None)
        except InfeasibleError as impossible:
            self.levels.errors.append((impossible, candidate))
            return []
        is_small = first[0] is evaluator and first[1] is candidate
        if is_small and within(evaluator.budget_bytes, free.size_bytes):
            return [self._leaf(node, free, evaluator, small)]
        least_s = free.least_s / (1 + self.slack_rel)
        return [node.after("free", least_s, lambda _: self._tried(node, chain([first], small)))]

    def _small(self, attempts: Sequence[Candidate]) -> Iterator[tuple[Evaluator, Candidate]]:
        """The attempts that may fit by their sizes. More microbatches need no more bytes."""
        for evaluator in self._evaluators:
            first = bisect_left(attempts, True, key=partial(_may_fit, evaluator))
            yield from ((evaluator, candidate) for candidate in attempts[first:])

    @cached_property
    def _evaluators(self) -> list[Evaluator]:
        """Without recompute, unless the user chose it; then with each mode that there is."""
        whole = self.levels.simulator.evaluator
        plain = whole.without_recompute
        found = [plain or whole]
        for mode in _MODES if plain is not None else ():
            with suppress(NotSupportedError):
                found.append(whole.recomputing(mode))
        return found

    def _tried(self, node: Node, attempts: Iterator[tuple[Evaluator, Candidate]]) -> Parts:
        """The first attempt that fits by the solver's bytes."""
        last: tuple[InfeasibleError, Candidate] | None = None
        for evaluator, candidate in attempts:
            try:
                placed = evaluator.placed(candidate, evaluator.budget_bytes)
            except InfeasibleError as error:
                last = error, candidate
                continue
            return [self._leaf(node, placed, evaluator, attempts)]
        if last is not None:
            self.levels.errors.append(last)
        return []

    def _leaf(
        self, node: Node, placed: Placed, evaluator: Evaluator,
        attempts: Iterator[tuple[Evaluator, Candidate]],
    ) -> Node:  # fmt: skip
        """A solved attempt, which is left to simulate."""
        refine = partial(self._simulated, node, placed, evaluator, attempts)
        leaf = node.after("solved", placed.least_s / (1 + self.slack_rel), refine)
        return replace(leaf, placed=placed)

    def _simulated(
        self, node: Node, placed: Placed, evaluator: Evaluator,
        attempts: Iterator[tuple[Evaluator, Candidate]], _: float,
    ) -> Parts:  # fmt: skip
        """The attempt, if its simulated peak fits; else the next one."""
        try:
            return [self.levels.simulator.on(evaluator).simulated(placed)]
        except InfeasibleError as error:
            self.levels.errors.append((error, placed.candidate))
            return self._tried(node, attempts)


def _may_fit(evaluator: Evaluator, candidate: Candidate) -> bool:
    return within(evaluator.budget_bytes, evaluator.size_bound_bytes(candidate))
