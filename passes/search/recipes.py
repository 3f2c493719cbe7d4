"""The plain recipes as nodes: what a person would try first, and the first incumbents.

    data parallel, ZeRO-1, 2, 3      every axis splits the batch
    Megatron                         dp x tp, on every view of two axes
    Megatron with SP and ZeRO        the same with activations split between matmuls, and shards;
                                     on views with cp, with sequences split, too (`contexts.py`)

Beside these, layouts that are known by name are priced for the rows of the result, and for nothing
else (`known_layouts`):

    HSDP                             ZeRO-3 inside of a node, copies across nodes
    FSDP x TP                        ZeRO-3 across nodes, Megatron with SP inside of a node

A recipe is tried with the fewest microbatches that fit, first without recompute. Then gathers of
sequence parallelism run again, as Megatron's do, then more, then all. (Of the user's own recipe
only these gathers, if it does not say what runs again.) Beside Megatron, ZeRO-3 is tried where
ZeRO-1 does not fit. Its placements are in the search's space, too, so a recipe bounds nothing: its
node's bound is that of its own placements.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product, starmap

from autopar.errors import InfeasibleError, NotSupportedError
from autopar.manual import Recompute
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    axes_text,
    context_counts,
    microbatch_counts,
    n_operators,
    plain_order,
)
from autopar.passes.intra import SPLIT_BATCH, Constraints, Role, recipe_roles, too_little_memory
from autopar.passes.search.branch_bound import NOT_IN_TIME, Node
from autopar.passes.search.evaluator import Evaluator, Proposal
from autopar.passes.search.levels import Levels, Parts
from autopar.passes.search.simplicity import Simplicity
from autopar.passes.solvers.problem import TimeLimitError, within

# How far a simulated step is below what its placements take at least (`Proposal.least_s`),
# relative, for what `passes/analysis/gathering.py` says. `tests/search/test_simulator.py` measures
# it.
SLACK_REL = 0.02
_GATHERS: Recompute = "gathers"
_MODES: tuple[Recompute, ...] = (_GATHERS, "selective", "full")


@dataclass(frozen=True)
class PlainRecipe:
    """A recipe on one view: `family` is its plain name, `names` say all. There is a name for each
    of its constraints, in the order in which they are tried."""

    family: str
    view: LogicalMesh
    names: Mapping[str, Constraints]

    @property
    def roles(self) -> tuple[Role, ...]:
        (found,) = {limits.roles for limits in self.names.values()}
        return found


def recipes_on(views: Sequence[LogicalMesh], options: Options) -> Iterator[PlainRecipe]:
    """The recipes of one stage, without those that `forbid` excludes."""
    views, forbid = [v for v in views if v.active_axes], options.forbid
    fixes_degrees = not isinstance(options.mesh_shape, str)
    plain = [v for v in views if not fixes_degrees or v.axes["dp"] == v.n_ranks]
    for view in plain[:1]:  # for data parallelism all views are the same
        data: Role = "data"
        for zero, family in enumerate(("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
            if not forbid & {"data", f"zero{zero}"}:
                limits = Constraints(forbid, (data,) * view.n_axes, zero)
                yield PlainRecipe(family, view, {family: limits})
    for view in views:
        yield from megatron_on(view, options)


def megatron_on(view: LogicalMesh, options: Options) -> Iterator[PlainRecipe]:
    """Megatron's recipes on dp x tp or dp x cp x tp, without those that `forbid` excludes."""
    forbid, n_data, n_tensor = options.forbid, view.sizes[0], view.sizes[-1]
    has_context = view.n_axes == 3 and view.axes.get("cp", 1) > 1
    if view.n_axes != 2 + has_context or (n_tensor == 1 and not has_context):
        return
    if (n_tensor > 1 and "tensor" in forbid) or (n_data > 1 and "data" in forbid):
        return
    roles = recipe_roles(("dp", "cp", "tp") if has_context else ("dp", "tp"))
    if not has_context:
        whole = Constraints(forbid | {"sequence"}, roles, 0)
        yield PlainRecipe("Megatron", view, {"Megatron": whole})
    splits_data = n_data > 1 or has_context
    zeros = [z for z in (1, 3) if f"zero{z}" not in forbid] if splits_data else [0]
    if zeros and "sequence" not in forbid:
        words = ["SP"] * (n_tensor > 1) + ["ZeRO-{}"] * splits_data
        name = "Megatron with " + " and ".join(words)
        sharded = {name.format(zero): Constraints(forbid, roles, zero) for zero in zeros}
        yield PlainRecipe("Megatron", view, sharded)


def known_layouts(
    mesh: Mesh, views: Sequence[LogicalMesh], forbid: Set[str]
) -> Iterator[PlainRecipe]:
    """Layouts of the view of nodes x devices per node that are no recipes of the search."""
    n_nodes, n_local = mesh.nodes, mesh.devices_per_node
    view = next((v for v in views if v.sizes == (n_nodes, n_local)), None)
    if view is None or min(view.sizes) == 1 or forbid & {"data", "zero3"}:
        return
    copies = Constraints(frozenset(forbid), ("copy", "data"), 3)
    yield PlainRecipe("HSDP", replace(view, names=("dp", "fsdp")), {"HSDP": copies})
    if not forbid & {"tensor", "sequence"}:
        both = Constraints(frozenset(forbid), ("data", "tensor"), 3)
        yield PlainRecipe("FSDP x TP", view, {"FSDP x TP": both})


@dataclass(frozen=True)
class RecipeNodes:
    """Makes the nodes of recipes. Steps are at most so far below what their placements take."""

    levels: Levels
    slack_rel: float = SLACK_REL

    def root(self, *series: Sequence[Candidate]) -> Node:
        """A recipe, with candidates in the order in which they are tried. Of a series, each has
        more microbatches than the one before."""
        first = series[0][0]
        simplest = Simplicity.recipe_on(first)
        node = Node(first.name, 0.0, simplest, "recipe", None, recipe=first.recipe)
        return node.after("recipe", 0.0, lambda _: self._free(node, series))

    def single_stage(self, recipe: PlainRecipe) -> Node:
        """A recipe of one stage, with every number of microbatches worth trying."""
        evaluator, view = self.levels.simulator.evaluator, recipe.view
        n_splits = math.prod(
            n for n, role in zip(view.sizes, recipe.roles, strict=True) if role in SPLIT_BATCH
        )
        analysis, options = evaluator.analysis, evaluator.options
        counts = microbatch_counts(analysis, options, view.n_ranks, n_splits)
        counts = context_counts(analysis, options, view, counts)
        ends = (n_operators(analysis.program),)

        def candidates_of(name: str, limits: Constraints) -> list[Candidate]:
            on = f"{name} on {axes_text(view)}", ends, (StageLayout(view, limits),)
            order = plain_order(options)
            return [Candidate(*on, m, recipe=recipe.family, schedule=order) for m in counts]

        return self.root(*starmap(candidates_of, recipe.names.items()))

    def priced(self, recipe: PlainRecipe, known_s: float) -> list[Node]:
        """A recipe as nodes with its price, or with a bound above `known_s`; none if it does not
        fit. Nothing is simulated."""
        parts: Parts = [self.single_stage(recipe)]
        while parts:
            (node,) = parts
            assert isinstance(node, Node) and node.refine is not None, "nothing is simulated"
            if node.placed is not None or node.bound_s > known_s:
                return [node]
            try:
                parts = node.refine(math.inf)
            except TimeLimitError:  # its solver gave up
                return [replace(node, note=NOT_IN_TIME)]
        return []

    def rule_out(self, candidate: Candidate) -> bool:
        """Is it too large even where all runs again? Nothing is solved."""
        is_too_large = not _may_fit(self._evaluators[-1], candidate)
        if is_too_large:
            self.levels.impossible(self._too_little_memory(candidate), candidate)
        return is_too_large

    def _too_little_memory(self, candidate: Candidate) -> InfeasibleError:
        leanest = self._evaluators[-1]
        least_bytes = leanest.size_bound_bytes(candidate)
        return too_little_memory(leanest.budget_bytes, least_bytes, candidate.name)

    def _free(self, node: Node, series: Sequence[Sequence[Candidate]]) -> Parts:
        """As if memory had no limit: fewest microbatches, nothing runs again.

        Sizes are checked before, so that what is too large is not solved.
        """
        small = self._small(series)
        first = next(small, None)
        if first is None:
            self.levels.impossible(self._too_little_memory(series[-1][-1]), series[-1][-1])
            return []
        evaluator, candidate = self._evaluators[0], series[0][0]
        try:
            free = evaluator.placed(candidate, None)
        except InfeasibleError as impossible:
            self.levels.impossible(impossible, candidate)
            return []
        is_small = first[0] is evaluator and first[1] is candidate
        if is_small and within(evaluator.budget_bytes, free.size_bytes):
            return [self._leaf(node, free, evaluator, small)]
        least_s = free.least_s / (1 + self.slack_rel)
        return [node.after("free", least_s, lambda _: self._try(node, chain([first], small)))]

    def _small(
        self, series: Sequence[Sequence[Candidate]]
    ) -> Iterator[tuple[Evaluator, Candidate]]:
        """The attempts that may fit by their sizes. More microbatches need no more bytes."""
        for evaluator, candidates in product(self._evaluators, series):
            if evaluator.options.recompute == _GATHERS and not _shards_sequences(candidates[0]):
                continue
            first = bisect_left(candidates, True, key=partial(_may_fit, evaluator))
            yield from ((evaluator, candidate) for candidate in candidates[first:])

    @cached_property
    def _evaluators(self) -> list[Evaluator]:
        """Without recompute, unless the user chose it; then with each mode that there is."""
        whole = self.levels.simulator.evaluator
        plain, options = whole.plain_evaluator, whole.options
        found = [plain or whole]
        modes = _MODES if plain is not None else ()
        is_manual = options.manual is not None and options.recompute == "auto"
        if is_manual and whole.recomputable is None and "recompute" not in options.forbid:
            modes = (_GATHERS,)
        for mode in modes:
            with suppress(NotSupportedError):
                found.append(whole.recompute_evaluator(mode))
        return found

    def _try(self, node: Node, attempts: Iterator[tuple[Evaluator, Candidate]]) -> Parts:
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
            self.levels.impossible(*last)
        return []

    def _leaf(
        self, node: Node, placed: Proposal, evaluator: Evaluator,
        attempts: Iterator[tuple[Evaluator, Candidate]],
    ) -> Node:  # fmt: skip
        """A solved attempt, which is left to simulate."""
        refine = partial(self._simulate, node, placed, evaluator, attempts)
        leaf = node.after("solved", placed.least_s / (1 + self.slack_rel), refine)
        return replace(leaf, placed=placed, name=placed.candidate.name)

    def _simulate(
        self, node: Node, placed: Proposal, evaluator: Evaluator,
        attempts: Iterator[tuple[Evaluator, Candidate]], _: float,
    ) -> Parts:  # fmt: skip
        """The attempt, if its simulated peak fits; else the next one."""
        try:
            return [self.levels.simulator.on(evaluator).simulated(placed)]
        except InfeasibleError as error:
            self.levels.impossible(error, placed.candidate)
            return self._try(node, attempts)


def _shards_sequences(candidate: Candidate) -> bool:
    """Does it have sequence parallelism?"""
    return any(
        "sequence" not in layout.constraints.forbid and n > 1
        for layout in candidate.stages
        for n, role in zip(layout.view.sizes, layout.constraints.roles, strict=True)
        if role == "tensor"
    )


def _may_fit(evaluator: Evaluator, candidate: Candidate) -> bool:
    return within(evaluator.budget_bytes, evaluator.size_bound_bytes(candidate))
