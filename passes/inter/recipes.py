"""The Megatron recipe with stages: equal submeshes, layers of balanced FLOPs, one view for all.

Each of S stages has dp x tp ranks. The batch is split over dp and matmuls over tp (the roles "data"
and "tensor" of `passes/intra/constraints.py`). Placements are chosen on the abstract machine of
recipes (`recipe_cost`) and priced on the real one. The number of microbatches is
the best that fits in memory, by the closed form

    sum_s time_s + (m - 1) max_s time_s + max_s once_s

over the estimates of `tables.py` (`_Recipe.best`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.hardware import Hardware
from autopar.errors import BatchError, InfeasibleError, MeshError
from autopar.mesh import LogicalMesh, Mesh, factored_view, has_degrees
from autopar.options import Manual, Options
from autopar.passes.analysis import (
    FIRST_COUNT_PER_STAGE,
    Analysis,
    microbatch_counts,
    recipe_counts,
)
from autopar.passes.inter.attribution import PARTS
from autopar.passes.inter.candidate import Candidate, StageLayout
from autopar.passes.inter.joint import JointSearch, climb
from autopar.passes.inter.layers import MOST_LAYERS, balanced
from autopar.passes.inter.submeshes import SubmeshPlace, places_of, view_at, views_text
from autopar.passes.inter.tables import StageTable, TableMaker
from autopar.passes.intra import Constraints, recipe_cost, static_bytes

Array = NDArray[np.float64]


def recipe_candidates(
    search: JointSearch,
    manual: Manual | None = None,
    n_most: int | None = None,
    limit_s: float = math.inf,
) -> list[Candidate]:
    """Megatron pipelines for the program and machine of `search`, the fastest estimate first.

    At most `n_most` come out. Recipes are skipped if their lower bound exceeds `limit_s`, or if
    they fit with no number of microbatches. With `manual` there is one candidate, the recipe asked
    for; if it never fits, it has the most microbatches.

    Raises `MeshError` if `manual` does not place every rank, and `OptionError` or `BatchError` if
    the batch does not divide as it says.
    """
    mesh, options = search.mesh, search.options
    if manual is None:
        splits = list(_splits(search.analysis, mesh, options))
    else:
        check_ranks(manual, mesh)
        splits = [_Split(manual.pp, manual.dp, manual.tp)]
    splits = [s for s in splits if s.n_stages > 1]
    if not splits:
        return []
    # The recipe asked for is cut into the same layers as all others. `n_least` is capped, because
    # no model has thousands of layers worth a stage.
    n_least = max(min(mesh.n_ranks, MOST_LAYERS), manual.pp if manual else 0)
    search = search.with_layers(n_least, max(mesh.n_ranks, MOST_LAYERS))
    splits = [s for s in splits if s.n_stages <= search.layers.n_layers]
    maker = replace(search.maker, pricing=recipe_cost)
    limits = recipe_limits(options, manual)
    cuts = {n: balanced(search.layers.flops, n) for n in {split.n_stages for split in splits}}
    recipes = [_Recipe(search, maker, split, limits, cuts[split.n_stages]) for split in splits]
    if manual is not None:
        return [recipe.candidate(*recipe.best(recipe.counts(manual))) for recipe in recipes]
    static = static_bytes(search.analysis, maker.dtype, options.optimizer)
    recipes = [recipe for recipe in recipes if recipe.least_bytes(static) <= search.budget_bytes]
    return [recipe.candidate(cost_s, m) for cost_s, recipe, m in _fastest(recipes, n_most, limit_s)]


def _fastest(
    recipes: Sequence[_Recipe], n_most: int | None, limit_s: float
) -> list[tuple[float, _Recipe, int]]:
    """The fastest recipes that fit, as (seconds, recipe, microbatches).

    A recipe is not priced if its lower bound exceeds `limit_s` or the `n_most`-th best so far.
    """
    found: list[tuple[float, int, int]] = []
    counts = [recipe.counts() for recipe in recipes]
    least_s = [recipe.least_s(of) for recipe, of in zip(recipes, counts, strict=True)]
    for i in sorted(range(len(recipes)), key=least_s.__getitem__):
        if n_most is not None and len(found) >= n_most:
            limit_s = min(limit_s, found[n_most - 1][0])
        if least_s[i] > limit_s:
            break
        cost_s, m = recipes[i].best(counts[i])
        if math.isfinite(cost_s):
            insort(found, (cost_s, i, m))
    return [(cost_s, recipes[i], m) for cost_s, i, m in found[:n_most]]


@dataclass(frozen=True)
class _Split:
    """Equal stages of `dp` x `tp` ranks."""

    n_stages: int
    dp: int
    tp: int

    def view(self, mesh: Mesh, hardware: Hardware) -> LogicalMesh:
        """The view of the first stage."""
        axes = {"dp": self.dp, "tp": self.tp}
        return factored_view(mesh, hardware.links, hardware.device, axes)


def _splits(analysis: Analysis, mesh: Mesh, options: Options) -> Iterator[_Split]:
    """Every split that `forbid` allows. With `force` there is none: it pins what recipes decide."""
    if "pipeline" in options.forbid or options.force:
        return
    for n_stages in (n for n in range(2, mesh.n_ranks + 1) if mesh.n_ranks % n == 0):
        each = mesh.n_ranks // n_stages
        for tp in (n for n in range(1, each + 1) if each % n == 0):
            dp = each // tp
            if not has_degrees(options.mesh_shape, {"dp": dp, "tp": tp}):
                continue
            splits_batch = dp > 1 and ("data" in options.forbid or not analysis.batch.size)
            if not splits_batch and not (tp > 1 and "tensor" in options.forbid):
                yield _Split(n_stages, dp, tp)


def check_ranks(manual: Manual, mesh: Mesh) -> None:
    """Raises `MeshError` if the recipe does not place every rank of the mesh."""
    if manual.pp * manual.dp * manual.tp != mesh.n_ranks:
        sizes = f"dp={manual.dp}, tp={manual.tp}, pp={manual.pp}"
        raise MeshError(
            f"Manual({sizes}) places {manual.pp * manual.dp * manual.tp} ranks, "
            f"the mesh has {mesh.n_ranks}",
            hint="make dp * tp * pp the number of devices",
        )


def recipe_limits(options: Options, manual: Manual | None) -> Constraints:
    """The constraints of Megatron; without `manual`, no ZeRO and no sequence parallelism."""
    sequence = frozenset() if manual is not None and manual.sp else frozenset({"sequence"})
    zero = manual.zero if manual is not None else 0
    return Constraints(options.forbid | sequence, ("data", "tensor"), zero)


@dataclass(frozen=True)
class _Recipe:
    """One split of the mesh, priced with any number of microbatches.

    `last_layers` has the last layer of each stage.
    """

    search: JointSearch
    maker: TableMaker
    split: _Split
    limits: Constraints
    last_layers: Sequence[int]
    # Numbers of microbatches that were priced -> per stage, its static bytes, and the bytes that
    # one microbatch keeps.
    _sizes: dict[int, tuple[Array, Array]] = field(default_factory=dict, init=False)

    def least_bytes(self, static: float) -> float:
        """Lower bound on the bytes of the largest stage, with any number of microbatches.

        `static` are the static bytes of the whole program.
        """
        return static / (self.split.n_stages * self.limits.n_static_shares(self._view.sizes))

    def least_s(self, counts: Sequence[int]) -> float:
        """Lower bound on a step with any of `counts`."""
        bounds, n_ranks = self.search.bounds, self._view.n_ranks
        return min(bounds.balanced_s(self.last_layers, n_ranks, m) for m in counts)

    def best(self, counts: Sequence[int]) -> tuple[float, int]:
        """(estimated seconds, number of microbatches); infinite seconds if no count fits."""
        n_stages = self.split.n_stages
        known: dict[int, float] = {}

        def cost_s(m: int) -> float:
            if m not in known and self._is_too_large(m):
                known[m] = math.inf
            elif m not in known:
                self.search.report(f"recipe of {n_stages} stages with {m} microbatches")
                known[m] = self._cost_s(m)
            return known[m]

        wanted = FIRST_COUNT_PER_STAGE * n_stages
        start = next((i for i, m in enumerate(counts) if m >= wanted), len(counts) - 1)
        best = climb(counts[start:], cost_s)
        # If the first count does not fit, larger microbatches do not fit either.
        if best == counts[start] and math.isfinite(cost_s(best)):
            climb(counts[start::-1], cost_s)
        m = min(known, key=lambda n: (known[n], -n))
        return known[m], m

    def counts(self, manual: Manual | None = None) -> list[int]:
        """Numbers of microbatches such that each microbatch divides over the dp ranks."""
        analysis, options = self.search.analysis, self.search.options
        n_devices = self.search.mesh.n_ranks
        if manual is not None:
            return recipe_counts(analysis, options, manual, n_devices)
        return microbatch_counts(analysis, options, n_devices, self.split.dp)

    @cached_property
    def _view(self) -> LogicalMesh:
        return self.split.view(self.search.mesh, self.search.hardware)

    def _cost_s(self, m: int) -> float:
        """The closed form; infinite if a stage does not fit."""
        view = self._view
        try:
            costs = self.maker.recipe(view, m, self.limits)
        except (InfeasibleError, BatchError):
            return math.inf
        tables = self._of_stages(costs)
        self._sizes[m] = tables["static"], tables["activation"]
        if self._is_too_large(m):
            return math.inf
        times = tables["time"]
        return float(times.sum() + (m - 1) * times.max() + tables["once"].max())

    def _is_too_large(self, m: int) -> bool:
        """Is it proven, by the sizes known so far, that some stage does not fit?

        A microbatch n times smaller keeps at least 1/n of the bytes.
        """
        n_stages = self.split.n_stages
        in_flight = np.array([self.search.depth(m, n_stages - s) for s in range(n_stages)])
        return any(
            (static + in_flight * activation * min(1.0, priced / m)).max()
            > self.search.budget_bytes
            for priced, (static, activation) in self._sizes.items()
        )

    def _of_stages(self, costs: StageTable) -> dict[str, np.ndarray]:
        last = self.last_layers
        at = np.array([0, *(layer + 1 for layer in last[:-1])]), np.array(last)
        tables = {part: costs.ranges(part)[at] for part in PARTS}
        messages = {p: costs.messages(p.before, p.after) for p in dict.fromkeys(self._places)}
        messages_s = [
            messages[place][first, end] for first, end, place in zip(*at, self._places, strict=True)
        ]
        tables["time"] = np.maximum(tables["time"] + costs.conversions()[at], 0.0) + messages_s
        return tables

    @cached_property
    def _places(self) -> list[SubmeshPlace]:
        """The place of each stage in its node.

        A stage that straddles two nodes has both neighbours on other nodes.
        """
        mesh, each, across = self.search.mesh, self._view.n_ranks, self.search.hardware.links[0]
        places = (*places_of(mesh, self.search.hardware, each), SubmeshPlace(None, across, across))
        firsts = [k * each % mesh.devices_per_node for k in range(self.split.n_stages)]
        return [next(p for p in places if p.offsets is None or f in p.offsets) for f in firsts]

    def candidate(self, cost_s: float, m: int) -> Candidate:
        mesh, hardware, view = self.search.mesh, self.search.hardware, self._view
        views = [
            view_at(mesh, hardware, view, k * view.n_ranks) for k in range(self.split.n_stages)
        ]
        return Candidate(
            f"Megatron, {views_text(views)}, m={m}",
            self.search.layers.ends_of(self.last_layers),
            tuple(StageLayout(v, self.limits) for v in views),
            m,
            cost_s,
            "Megatron",
        )
