"""The planner: candidate plans of one stage, priced alike; the best one wins.

For every logical view of the mesh and every number of microbatches worth trying, the
intra-operator problem is solved; the plain recipes (data parallelism, ZeRO-3, Megatron) are
evaluated as candidates too, so the result is never worse than they are by its own model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.model import CostModel
from autopar.errors import BatchError, InfeasibleError, MeshError, OptionError
from autopar.mesh import Device, Link, LogicalMesh, Mesh, factored_view, logical_views
from autopar.options import Manual, Options
from autopar.passes.constraints import Constraints, Pin, Role
from autopar.passes.intra_op import Analysis, Chosen, choose
from autopar.passes.lower import lower
from autopar.plan_data import Alternative
from autopar.stage_program import StageProgram

# Microbatch counts tried when memory does not allow fewer.
_MAX_MICROBATCHES = 64
Progress = Callable[[str], None]
# (program, cost, optimizer) -> predicted seconds of a step
Predict = Callable[[StageProgram, CostModel, str], float]


@dataclass(frozen=True)
class Outcome:
    """The winning plan: where, what, and what it beat."""

    mesh: LogicalMesh
    chosen: Chosen
    program: StageProgram
    hardware: Hardware
    name: str
    step_time_s: float
    forbid: frozenset[str]
    alternatives: tuple[Alternative, ...] = ()


def compute_dtype(analysis: Analysis) -> torch.dtype:
    """The dtype most parameters have; matmuls are priced in it."""
    counts: dict[torch.dtype, int] = {}
    for info in analysis.program.parameters.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] = counts.get(info.dtype, 0) + torch.Size(info.shape).numel()
    return max(counts, key=counts.__getitem__) if counts else torch.float32


@dataclass(frozen=True)
class Planner:
    """Plans one captured program on one machine."""

    analysis: Analysis
    mesh: Mesh
    options: Options
    predict: Predict
    report: Progress = lambda text: None

    def run(self) -> Outcome:
        """The best plan; raises `InfeasibleError` when nothing fits."""
        hardware = resolve(self.mesh, compute_dtype(self.analysis))
        budget = self.options.memory_limit or hardware.memory_limit_bytes
        found: list[Outcome] = []
        notes: list[Alternative] = []
        errors: list[InfeasibleError] = []
        for name, view, constraints in self._candidates(hardware):
            self.report(f"planning {name}")
            try:
                found.append(self._solve(name, view, constraints, hardware, budget))
            except InfeasibleError as error:
                errors.append(error)
                notes.append(Alternative(name, None, str(error).splitlines()[0]))
        if not found:
            raise errors[0]
        least = min(o.step_time_s for o in found)
        # Among equals the first: a search before the recipes it ties with.
        best = next(o for o in found if o.step_time_s <= least * (1 + 1e-9))
        found.sort(key=lambda o: o.step_time_s)
        rows = (*(Alternative(o.name, o.step_time_s) for o in found), *notes)
        return replace(best, alternatives=rows)

    # -- candidates --------------------------------------------------------------------------

    def _candidates(self, hardware: Hardware) -> Iterator[tuple[str, LogicalMesh, Constraints]]:
        if self.options.manual is not None:
            yield self._manual(self.options.manual, hardware)
            return
        views = logical_views(self.mesh, hardware.links, hardware.device, self.options.mesh_shape)
        for view in views:
            pins = self._pins(view)
            yield (
                f"search on {axes_text(view)}",
                view,
                Constraints(self.options.forbid, pins=pins),
            )
        if not self.options.force:
            yield from self._recipes(views)

    def _pins(self, view: LogicalMesh) -> dict[str, tuple[Pin, ...]]:
        placeholders = {}
        for placeholder, info in self.analysis.program.parameters.items():
            for name in (info.name, *info.aliases):
                placeholders[name] = placeholder
        pins: dict[str, tuple[Pin, ...]] = {}
        for pin in self.options.force:
            if pin.parameter not in placeholders:
                raise OptionError(
                    f"force names {pin.parameter!r}, which is no parameter of the model",
                    hint=f"parameters are such as {', '.join(list(placeholders)[:3])}",
                )
            axis = pin.axis_index(view.names)
            if self.options.mesh_shape == "auto" and view.sizes[axis] == 1:
                continue
            made = Pin(pin.storage, pin.use, axis)
            key = placeholders[pin.parameter]
            pins[key] = (*pins.get(key, ()), made)
        return pins

    def _recipes(
        self, views: Sequence[LogicalMesh]
    ) -> Iterator[tuple[str, LogicalMesh, Constraints]]:
        """Plain data parallelism, ZeRO-3 and Megatron, as far as `forbid` allows them."""
        forbid = self.options.forbid
        views = [v for v in views if v.active_axes and self.analysis.batch.size]
        for view in views[:1]:  # every view of the ranks is the same to data parallelism
            data: Role = "data"
            everywhere = (data,) * view.n_axes
            if "data" not in forbid:
                yield (
                    f"data parallel on {axes_text(view)}",
                    view,
                    Constraints(forbid, everywhere, 0),
                )
                if "zero3" not in forbid:
                    yield f"ZeRO-3 on {axes_text(view)}", view, Constraints(forbid, everywhere, 3)
        for view in views:
            splits_batch = view.sizes[0] > 1
            if view.n_axes != 2 or view.sizes[1] == 1 or "tensor" in forbid:
                continue
            if not (splits_batch and "data" in forbid):
                roles: tuple[Role, ...] = ("data", "tensor")
                limits = Constraints(forbid | {"sequence"}, roles, 0)
                yield f"Megatron on {axes_text(view)}", view, limits

    def _manual(self, manual: Manual, hardware: Hardware) -> tuple[str, LogicalMesh, Constraints]:
        if manual.dp * manual.tp != self.mesh.n_ranks:
            raise MeshError(
                f"Manual(dp={manual.dp}, tp={manual.tp}) places {manual.dp * manual.tp} ranks, "
                f"the mesh has {self.mesh.n_ranks}",
                hint="make dp * tp the number of devices",
            )
        if self.options.force:
            raise OptionError("manual is the whole recipe; force cannot be combined with it")
        self._check_rows(manual)
        view = factored_view(
            self.mesh, hardware.links, hardware.device, {"dp": manual.dp, "tp": manual.tp}
        )
        forbid = self.options.forbid | (frozenset() if manual.sp else {"sequence"})
        return "manual recipe", view, Constraints(forbid, ("data", "tensor"), manual.zero)

    def _check_rows(self, manual: Manual) -> None:
        """Refuse a batch that data parallelism and the microbatches asked for do not divide."""
        given, n_rows = self.options.microbatches, self.analysis.batch.size
        n_microbatches = given if isinstance(given, int) else 1
        if manual.dp > 1 and n_rows == 0:
            raise BatchError(
                f"dp={manual.dp} splits the batch, and no input has a batch of several rows",
                hint="give a larger batch, or say where it is with batch_dims",
            )
        if manual.dp > 1 and n_rows % (manual.dp * n_microbatches):
            raise BatchError(
                f"a batch of {n_rows} rows does not divide over dp={manual.dp} ranks"
                + (f" x {n_microbatches} microbatches" if n_microbatches > 1 else ""),
                hint="choose a batch size that divides, or drop_last=True in the loader",
            )

    # -- solving -----------------------------------------------------------------------------

    def _microbatch_counts(self, view: LogicalMesh, constraints: Constraints) -> list[int]:
        manual, batch = self.options.manual, self.analysis.batch
        if manual is not None and manual.microbatch_size is not None:
            rows = batch.size // manual.dp
            if rows % manual.microbatch_size:
                raise OptionError(
                    f"microbatch_size={manual.microbatch_size} does not divide the {rows} rows "
                    f"of one data-parallel rank"
                )
            return [rows // manual.microbatch_size]
        if isinstance(self.options.microbatches, int):
            batch.check_divides(self.options.microbatches)
            return [self.options.microbatches]
        if batch.size == 0 or batch.broken_at is not None:
            return [1]
        limit = min(batch.size, _MAX_MICROBATCHES)
        powers = [m for m in range(1, limit + 1) if batch.size % m == 0 and m & (m - 1) == 0]
        # Each microbatch of a recipe is split over its data axes too.
        n_splits = math.prod(
            size for axis, size in enumerate(view.sizes) if constraints.role(axis) == "data"
        )
        return [m for m in powers if batch.size % (m * n_splits) == 0] or [1]

    def _solve(
        self,
        name: str,
        view: LogicalMesh,
        constraints: Constraints,
        hardware: Hardware,
        budget_bytes: float,
    ) -> Outcome:
        """The fewest microbatches that fit: with one stage, more of them only cost time."""
        cost = CostModel(view, compute_dtype(self.analysis))
        last: InfeasibleError | None = None
        for m in self._microbatch_counts(view, constraints):
            try:
                chosen = self._choose(view, cost, m, constraints, budget_bytes)
            except InfeasibleError as error:
                last = error
                continue
            program = lower(self.analysis, chosen.strategy, cost)
            time_s = self.predict(program, cost, self.options.optimizer)
            if constraints.roles:  # laid out on an abstract machine; its cost is this one's
                chosen = replace(chosen, objective_s=time_s, gap=0.0)
            return Outcome(view, chosen, program, hardware, name, time_s, constraints.forbid)
        assert last is not None
        raise last

    def _choose(
        self,
        view: LogicalMesh,
        cost: CostModel,
        n_microbatches: int,
        constraints: Constraints,
        budget_bytes: float,
    ) -> Chosen:
        pricing = recipe_cost(cost) if constraints.roles else cost
        return choose(
            self.analysis,
            pricing,
            n_microbatches,
            constraints,
            self.options.optimizer,
            budget_bytes,
            self.options.solver,
            self.options.time_limit_s,
        )


def recipe_cost(cost: CostModel) -> CostModel:
    """The abstract machine a recipe is laid out on: flops dearest, then bytes moved between
    ranks, then bytes touched.

    The Megatron layout is the optimum of that order: split every product that can be, with
    the least communication. Real rates would let small models replicate.
    """
    mesh = cost.mesh
    machine = Device(flops_per_s=1.0, bytes_per_s=1e3, memory_bytes=mesh.device.memory_bytes)
    links = (Link(1.0, 1.0),) * mesh.n_axes
    view = LogicalMesh(mesh.sizes, mesh.names, links, machine, mesh.first_rank)
    return CostModel(view, cost.dtype)


def axes_text(view: LogicalMesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in view.axes.items())
