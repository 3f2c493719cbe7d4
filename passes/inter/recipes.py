"""Pipelines of equal submeshes: layers of balanced FLOPs, one view for all.

Each of p submeshes has dp x tp or dp x cp x tp ranks, and one stage or more, as the schedule says
(`orders.py`). In the Megatron recipe the batch is split over dp, matmuls over tp, sequences over cp
(the roles "data", "tensor" and "context" of `passes/intra/constraints.py`). Placements are chosen
on the abstract machine of recipes (`recipe_cost`) and priced on the real one. They are some of
those that the roles allow, so the layers' optima bound them, too (`EqualPipeline.layered_s`).

Else the solver is free. Views that differ in names alone count as one, and inner axes lie in a
node: layers' optima take communication between nodes for hidden. "auto" has at least as many
microbatches as submeshes, and the fewest chunks whose bubble is within the tie (`fewest_chunks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from autopar.arrays import Array
from autopar.errors import MeshError, OptionError
from autopar.manual import Manual
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.inter.bounds import shared_step_bound_s, step_bound_s
from autopar.passes.inter.candidate import Candidate, StageLayout
from autopar.passes.inter.contexts import (
    context_counts,
    rows_instead,
    stage_degrees,
)
from autopar.passes.inter.counts import microbatch_counts, recipe_counts
from autopar.passes.inter.layer_bounds import LeastSeconds
from autopar.passes.inter.layers import MOST_LAYERS, balance
from autopar.passes.inter.orders import PipelineOrder, orders_of, plain_order
from autopar.passes.inter.space import PipelineSpace
from autopar.passes.inter.submeshes import distinct_views, view_at, views_text
from autopar.passes.intra import Constraints, least_shared_bytes, recipe_roles
from autopar.passes.solvers.problem import BUDGET_REL
from autopar.rules import rule_for
from autopar.schedule import (
    SPLITS_BACKWARD,
    check_microbatches,
    fewest_microbatches,
    first_forwards,
)

# Prices of bytes, in steps per budget. On most of 36 pipelines of a Llama-70B on 128 GPUs, one of
# these was the best.
_STEPS_PER_BUDGET = (1 / 20, 1 / 12)
# Who places its operators: Megatron's layout, without and with sequence parallelism and ZeRO-1, the
# user's own numbers in it, or the solver.
Source = Literal["Megatron", "Megatron with SP and ZeRO-1", "manual", "search"]
_SHARDED: Source = "Megatron with SP and ZeRO-1"


@dataclass(frozen=True)
class EqualPipeline:
    """One pipeline of equal submeshes; `last_layers` has the last layer of each stage."""

    space: PipelineSpace
    view: LogicalMesh
    last_layers: tuple[int, ...]
    n_microbatches: int
    order: PipelineOrder
    source: Source = "Megatron"

    @property
    def shared_key(self) -> Hashable:
        """Pipelines of equal keys in one space have the same `shared_s`."""
        return self.view.n_ranks, self.last_layers, self.n_microbatches, self.order

    @cached_property
    def shared_s(self) -> float:
        """Lower bound on its step: every operator in equal shares; it costs nothing."""
        n_ranks, bounds, m = self.view.n_ranks, self.space.bounds, self.n_microbatches
        if self.order.schedule == plain_order(self.space.options):
            return bounds.span_of(self.last_layers, n_ranks, m)
        ranges = self._firsts, self.last_layers
        work_s = m * bounds.each_s(n_ranks, m)[ranges]
        return self._shared_step_s(work_s, work_s)

    @property
    def may_fit(self) -> bool:
        """May its parameters, gradients and state fit? It costs nothing."""
        parts = self.space.bounds.static_parts[:, self._firsts, self.last_layers]
        on = self.space.constraints(self.view), self.view.sizes, self.n_microbatches
        of_devices = np.bincount(self._devices, least_shared_bytes(parts, *on))
        return bool(of_devices.max() <= self.space.budget_bytes * (1 + BUDGET_REL))

    @property
    def layered_s(self) -> float:
        """Lower bound on its step: its span by what layers take at least on its view."""
        whole_s, work_s = self._layered
        if self.order.schedule != plain_order(self.space.options):
            return self._shared_step_s(whole_s, work_s)
        of_ranges = self.space.bounds.messages.passed_s(self.view.n_ranks, self.n_microbatches)
        passed_s = of_ranges[self._firsts, self.last_layers]
        on = self.n_microbatches, self.space.is_1f1b
        return step_bound_s(whole_s, work_s, *on, passed_s=passed_s)

    @property
    def _bounding(self) -> tuple[LogicalMesh, int]:
        """The view, with a number of microbatches, whose layers bound these."""
        own, space = (self.view, self.n_microbatches), self.space
        if "cp" not in self.view.axes:
            return own
        return rows_instead(space.analysis, space.mesh, space.hardware, *own) or own

    def staged_s(self, stage_s: Callable[[int, int, float], float], limit_s: float) -> float:
        """Lower bound on its step: what the stages of one device take at least within its budget.

        `stage_s` is what a stage takes at least with so many microbatches in flight, and a price on
        its bytes. At any moment the bytes of all stages of a device are at most the budget. So no
        step is below their sum without the price of the budget, whatever the price (weak duality).
        The device is the one whose layers take longest. No price is tried after `limit_s`.
        """
        at, budget_bytes = np.asarray(self._devices), self.space.budget_bytes * (1 + BUDGET_REL)
        of_devices_s, least_s = np.bincount(at, self._layered.whole_s), 0.0
        (stages,) = np.nonzero(at == of_devices_s.argmax())
        depths = first_forwards(self.order.schedule, self._devices, self.n_microbatches)
        for share in _STEPS_PER_BUDGET:
            price = float(of_devices_s.mean()) / budget_bytes * share
            priced_s = sum(stage_s(k, depths[k], price) for k in stages.tolist())
            least_s = max(least_s, priced_s - price * budget_bytes)
            if least_s >= limit_s:
                break
        return least_s

    def solved_s(self, whole_s: Array, once_s: Array) -> float:
        """Lower bound on its step if its stages take these seconds, [stages]: all, and those of
        once a step."""
        return self._shared_step_s(whole_s, np.maximum(whole_s - once_s, 0.0))

    @property
    def _layered(self) -> LeastSeconds:
        """[stages]: the sums of their layers."""
        found = self.space.layer_bounds.free(*self._bounding)
        return LeastSeconds(*(np.add.reduceat(of_layers, self._firsts) for of_layers in found))

    def _shared_step_s(self, whole_s: Array, work_s: Array) -> float:
        return shared_step_bound_s(whole_s, work_s, self._added_s(work_s), self._devices)

    def _added_s(self, work_s: Array) -> Array:
        m, splits = self.n_microbatches, self.order.schedule in SPLITS_BACKWARD
        on = self.last_layers, self.view.n_ranks, m, work_s / m, self._devices, splits
        return self.space.bounds.added_s(*on)

    @property
    def n_devices(self) -> int:
        return len(self.last_layers) // self.order.n_chunks

    @property
    def _devices(self) -> tuple[int, ...]:
        return self.order.devices(self.n_devices)

    @property
    def _firsts(self) -> list[int]:
        return [0, *(last + 1 for last in self.last_layers[:-1])]

    @property
    def candidate(self) -> Candidate:
        space, view = self.space, self.view
        on = space.mesh, space.hardware
        views = [view_at(*on, view, k * view.n_ranks) for k in range(self.n_devices)]
        name = f"{self._source_text}, {views_text(views)}"
        name = "manual recipe" if self.source == "manual" else name
        return Candidate(
            f"{name}, {self._order_text}m={self.n_microbatches}",
            space.layers.ends_of(self.last_layers),
            tuple(StageLayout(views[k], space.constraints(views[k])) for k in self._devices),
            self.n_microbatches,
            "Megatron" if self.is_recipe else "",
            self._row,
            self.order.schedule,
        )

    @property
    def is_recipe(self) -> bool:
        """Is it Megatron's, and nobody asked for it?"""
        return self.source in ("Megatron", _SHARDED)

    @property
    def _source_text(self) -> str:
        """What shards nothing here is left out."""
        if self.source != _SHARDED:
            return self.source
        axes = self.view.axes
        words = ["SP"] * (axes["tp"] > 1) + ["ZeRO-1"] * (axes["dp"] * axes.get("cp", 1) > 1)
        return "Megatron with " + " and ".join(words)

    @property
    def _order_text(self) -> str:
        """`interleaved x 2, `; nothing for one stage a rank in the usual order."""
        schedule, n_chunks = self.order
        if schedule == plain_order(self.space.options):
            return ""
        return f"{schedule}{f' x {n_chunks}' if schedule == 'interleaved' else ''}, "

    @property
    def _row(self) -> str:
        """`TP8 x PP4 x DP2`, of tensor parallelism over all of a node."""
        dp, tp, cp = (self.view.axes.get(name, 1) for name in ("dp", "tp", "cp"))
        if not self.is_recipe or tp == 1 or tp != self.space.mesh.devices_per_node:
            return ""
        order = self._order_text.removesuffix(", ")
        words = f"{self._source_text}, {order}" if order else self._source_text
        context = f" x CP{cp}" if cp > 1 else ""
        return f"TP{tp}{context} x PP{self.n_devices} x DP{dp} ({words})"


def equal_pipelines(
    space: PipelineSpace, source: Source = "Megatron", orders: Sequence[PipelineOrder] = ()
) -> list[EqualPipeline]:
    """The pipelines of equal submeshes for the program and machine of `space`, with these schedules
    (by default those asked for) and every number of microbatches.

    Raises `MeshError` if `manual` does not place every rank, `OptionError` if the model cannot be
    cut so often, or the schedule has not so many microbatches, and `OptionError` or `BatchError` if
    the batch does not divide as it says.
    """
    analysis, mesh, options = space.analysis, space.mesh, space.options
    orders, manual = orders or orders_of(options), options.manual
    if manual is None:
        splits = [*_splits(analysis, mesh, options, source)]
        if source == "search":
            splits = [
                (n_devices, view.axes)
                for n_devices in dict.fromkeys(n for n, _ in splits)
                for view in distinct_views(
                    mesh, space.hardware, options, [mesh.n_ranks // n_devices]
                )
                if view.sizes[-1] <= mesh.devices_per_node
            ]
    else:
        check_ranks(manual, mesh)
        check_experts(manual, analysis)
        splits = [(manual.pp, manual.axes)]
    n_stages_asked = manual.pp * orders[0].n_chunks if manual is not None else 0
    # The recipe asked for is cut into the same layers as all others. `n_least` is capped, because
    # no model has thousands of layers worth a stage.
    n_least = max(min(mesh.n_ranks, MOST_LAYERS), n_stages_asked)
    limits = recipe_limits(options, manual)
    if source == _SHARDED:
        limits = Constraints(options.forbid, limits.roles, 1)
    n_most = max(mesh.n_ranks, MOST_LAYERS)
    space = space.equal_space(None if source == "search" else limits, n_least, n_most)
    ends = _ends_that_learn(space)
    if n_stages_asked > len(ends):  # some stages have nothing to optimise
        ends = list(range(space.layers.n_layers))
    flops = np.add.reduceat(space.layers.flops, [0, *(end + 1 for end in ends[:-1])]).tolist()
    cuts = {
        n: [ends[last] for last in balance(flops, n)]
        for n in {n * order.n_chunks for n, _ in splits for order in orders}
        if n <= len(ends)
    }
    if manual is not None and n_stages_asked not in cuts:
        some = "1 stage" if len(ends) == 1 else f"{len(ends)} stages"
        asked = f"pp={manual.pp}" + (
            f", interleave={orders[0].n_chunks}" if orders[0].n_chunks > 1 else ""
        )
        raise OptionError(
            f"Manual({asked}): the model can be cut into {some}",
            hint="give fewer stages, and dp or tp the other ranks",
        )
    found = []
    for n_devices, axes in splits:
        view = factored_view(mesh, space.hardware.links, space.hardware.device, axes)
        if manual is not None:
            counts = recipe_counts(analysis, options, manual, mesh.n_ranks)
        elif source == "search":
            counts = [*space.counts]
        else:
            every = microbatch_counts(analysis, options, mesh.n_ranks, axes["dp"])
            counts = context_counts(analysis, options, view, every)
        for order in orders:
            possible = _counts_of(order, n_devices, counts, manual is not None)
            if source == "search" and options.schedule == "auto":
                possible = [m for m in possible if m >= n_devices]  # else most of a step is idle
            n_stages = n_devices * order.n_chunks
            last_layers = cuts.get(n_stages)
            if last_layers is not None and n_stages == (space.options.n_stages or n_stages):
                on = space, view, tuple(last_layers)
                found += [EqualPipeline(*on, m, order, source) for m in possible]
    return found


def fewest_chunks(pipelines: Sequence[EqualPipeline], tie: float) -> list[EqualPipeline]:
    """Those with the fewest stages a device whose bound by equal shares is within the tie of the
    least, of the same schedule, view and number of microbatches.

    More stages a device only shorten the bubble, which that bound knows, and send more.
    """
    alike = defaultdict[Hashable, list[EqualPipeline]](list)
    for of in sorted(pipelines, key=lambda of: of.order.n_chunks):
        alike[of.order.schedule, of.view, of.n_microbatches].append(of)
    found = []
    for group in alike.values():
        each_s = [of.shared_s for of in group]
        most_s = min(each_s) * (1 + tie)
        found.append(next(of for of, s in zip(group, each_s, strict=True) if s <= most_s))
    return found


def _counts_of(
    order: PipelineOrder, n_devices: int, counts: Sequence[int], is_manual: bool
) -> list[int]:
    """The numbers of microbatches that a schedule can have.

    Raises `OptionError` if it is asked for and can have none of them.
    """
    fewest = fewest_microbatches(order.schedule, n_devices)
    if is_manual and max(counts) < fewest:
        check_microbatches(order.schedule, n_devices, counts[-1])
    return [m for m in counts if m >= fewest]


def _ends_that_learn(space: PipelineSpace) -> list[int]:
    """The layers after which stages may end, so that each has a parameter to optimise.

    Those without are joined to the next that has one. If no parameter learns, all layers.
    """
    (learn,) = np.nonzero(np.diag(space.bounds.is_possible))
    n_layers = space.layers.n_layers
    return [*learn[:-1].tolist(), n_layers - 1] if len(learn) else [*range(n_layers)]


def _splits(
    analysis: Analysis, mesh: Mesh, options: Options, source: Source
) -> Iterator[tuple[int, dict[str, int]]]:
    """Every number of stages, and degrees of a stage. With `force` there is none: it pins what
    recipes decide. As first incumbents recipes have tp inside of a node, as Megatron's users do."""
    if "pipeline" in options.forbid or options.force:
        return
    # Beside tp, cp needs sequence parallelism. The search has cp only where it is asked for.
    may_have_context = source == _SHARDED or (source == "search" and options.mesh_shape != "auto")
    for n_stages in (n for n in range(2, mesh.n_ranks + 1) if mesh.n_ranks % n == 0):
        for axes in stage_degrees(analysis, options, mesh.n_ranks // n_stages):
            is_small = max(axes.values()) > 1 and axes["tp"] <= mesh.devices_per_node
            if (is_small or source != _SHARDED) and (may_have_context or "cp" not in axes):
                yield n_stages, axes


def check_ranks(manual: Manual, mesh: Mesh) -> None:
    """Raises `MeshError` if the recipe does not place every rank of the mesh."""
    if manual.n_ranks != mesh.n_ranks:
        degrees = manual.axes | {"pp": manual.pp}
        raise MeshError(
            f"Manual({', '.join(f'{name}={n}' for name, n in degrees.items())}) places "
            f"{manual.n_ranks} ranks, the mesh has {mesh.n_ranks}",
            hint=f"make {' * '.join(degrees)} the number of devices",
        )


def check_experts(manual: Manual, analysis: Analysis) -> None:
    """Raises `OptionError` if the recipe divides experts that the model has not, or not so many."""
    if manual.ep == 1:
        return
    numbers, name = numbers_of_experts(analysis), analysis.program.model_name
    if not numbers:
        raise OptionError(
            f"Manual(ep={manual.ep}): {name} has no experts that rows choose by id",
            hint="leave ep out",
        )
    for n, where in numbers.items():
        if n % manual.ep:
            raise OptionError(
                f"Manual(ep={manual.ep}): {n} experts do not divide over so many ranks",
                where=where,
                hint="make ep a divisor of the number of experts",
            )


def numbers_of_experts(analysis: Analysis) -> dict[int, str | None]:
    """Numbers of experts that rows choose by id -> where a mixture has so many."""
    return {
        operator.call.inputs[i][dim]: analysis.program.sources.get(operator.name)
        for operator in analysis.operators
        for name in rule_for(str(operator.call.op)).uneven_names
        for i, term in enumerate(operator.notation.inputs)
        for dim, names in enumerate(term)
        if names == (name,)
    }


def recipe_limits(options: Options, manual: Manual | None) -> Constraints:
    """The constraints of Megatron; without `manual`, no ZeRO and no sequence parallelism."""
    if manual is None:
        return Constraints(options.forbid | {"sequence"}, ("data", "tensor"), 0)
    sequence = frozenset() if manual.sp or manual.cp > 1 else frozenset({"sequence"})
    roles = recipe_roles(manual.axes)
    experts = frozenset(a for a, name in enumerate(manual.axes) if name in manual.expert_axes)
    return Constraints(options.forbid | sequence, roles, manual.zero, expert_axes=experts)
