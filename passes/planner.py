"""The planner: candidate plans, priced alike; the best one wins.

    one stage     for every logical view of the mesh, the intra-operator problem, with the
                  fewest microbatches that fit; and the plain recipes (data parallelism,
                  ZeRO-3, Megatron), so that the result is never worse than they are by its
                  own model
    more stages   the best of the joint search (`joint.py`) and the recipes with stages

Every candidate's stages are solved exactly and simulated (`evaluate.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost.hardware import Hardware, resolve
from autopar.errors import BatchError, InfeasibleError, MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh, factored_view, logical_views
from autopar.options import Manual, Options, StageOption
from autopar.passes.constraints import Constraints, Pin, Role
from autopar.passes.evaluate import Evaluator, Predict, Solved, compute_dtype
from autopar.passes.intra_op import Analysis
from autopar.passes.layout import (
    Candidate,
    StageLayout,
    balanced_ends,
    check_submesh,
    ends_by_modules,
    n_operators,
    submesh_shape,
)
from autopar.plan_data import Alternative

# Microbatch counts tried when memory does not allow fewer.
_MAX_MICROBATCHES = 64
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The winning plan, and what it beat."""

    solved: Solved
    hardware: Hardware
    alternatives: tuple[Alternative, ...] = ()

    @property
    def forbid(self) -> frozenset[str]:
        return self.solved.candidate.stages[0].constraints.forbid


# Candidates under one name: the first that fits is taken.
_Tries = tuple[str, list[Candidate]]


@dataclass(frozen=True)
class Planner:
    """Plans one captured program on one machine."""

    analysis: Analysis
    mesh: Mesh
    options: Options
    predict: Predict
    report: Progress = lambda text: None

    @cached_property
    def hardware(self) -> Hardware:
        return resolve(self.mesh, compute_dtype(self.analysis))

    @cached_property
    def budget_bytes(self) -> float:
        return self.options.memory_limit or self.hardware.memory_limit_bytes

    def run(self) -> Outcome:
        """The best plan.

        Raises `InfeasibleError` when nothing fits, `MeshError` where stages do not divide it.
        """
        evaluator = Evaluator(
            self.analysis, self.options, self.hardware, self.budget_bytes, self.predict
        )
        found: list[Solved] = []
        notes: list[Alternative] = []
        errors: list[InfeasibleError] = []
        for name, tries in self._candidates():
            self.report(f"planning {name}")
            solved = _first_that_fits(evaluator, tries)
            if isinstance(solved, Solved):
                found.append(solved)
            else:
                errors.append(solved)
                notes.append(Alternative(name, None, str(solved).splitlines()[0]))
        if not found and not errors:
            raise MeshError(
                f"stages={self.options.stages} cannot share {self.mesh.n_ranks} ranks evenly",
                hint="use a number that divides them, or a list of (module names, submesh shape)",
            )
        if not found:
            raise errors[0]
        least = min(s.step_time_s for s in found)
        # Among equals the first: a search before the recipes it ties with, one stage before more.
        best = next(s for s in found if s.step_time_s <= least * (1 + 1e-9))
        found.sort(key=lambda s: s.step_time_s)
        rows = (*(Alternative(s.candidate.name, s.step_time_s) for s in found), *notes)
        return Outcome(best, self.hardware, rows)

    # -- candidates --------------------------------------------------------------------------

    def _candidates(self) -> Iterator[_Tries]:
        stages = self.options.stages
        if self.options.manual is not None:
            yield from self._manual(self.options.manual)
        elif isinstance(stages, tuple):
            yield from self._given_stages(stages)
        else:
            if stages in ("auto", 1):
                yield from self._one_stage()
            if isinstance(stages, int) and stages > 1:
                yield from self._equal_stages(stages)

    def _one_stage(self) -> Iterator[_Tries]:
        views = self._views(0, self.mesh.n_ranks)
        for view in views:
            limits = Constraints(self.options.forbid, pins=self._pins(view))
            yield self._fewest(f"search on {axes_text(view)}", view, limits)
        if not self.options.force:
            for name, view, limits in self._recipes(views):
                yield self._fewest(name, view, limits)

    def _fewest(self, name: str, view: LogicalMesh, constraints: Constraints) -> _Tries:
        """The fewest microbatches that fit: with one stage, more of them only cost time."""
        layout, ends = StageLayout(view, constraints), (n_operators(self.analysis.program),)
        counts = self._microbatch_counts(view, constraints)
        return name, [Candidate(name, ends, (layout,), m) for m in counts]

    def _equal_stages(self, n_stages: int) -> Iterator[_Tries]:
        """Stages of balanced flops on equal shares of the mesh, all seen alike."""
        each, left = divmod(self.mesh.n_ranks, n_stages)
        if left or not each:
            return
        ends = balanced_ends(self.analysis, n_stages)
        views = zip(*(self._views(k * each, each) for k in range(n_stages)), strict=True)
        for alike in views:
            for m in self._stage_counts(n_stages):
                layouts = tuple(
                    StageLayout(v, Constraints(self.options.forbid, pins=self._pins(v)))
                    for v in alike
                )
                name = f"{stages_text(alike)}, m={m}"
                yield name, [Candidate(name, ends, layouts, m)]

    def _given_stages(self, stages: Sequence[StageOption]) -> Iterator[_Tries]:
        """The user's stages, every view of each submesh."""
        held = sum(s.n_ranks for s in stages)
        if held != self.mesh.n_ranks:
            raise MeshError(
                f"stages= hold {held} ranks, the mesh has {self.mesh.n_ranks}",
                hint="make the submeshes add up to the mesh",
            )
        ends = ends_by_modules(self.analysis.program, stages)
        first_rank, per_stage = 0, []
        for stage in stages:
            check_submesh(self.mesh, first_rank, stage)
            per_stage.append(self._views(first_rank, stage.n_ranks))
            first_rank += stage.n_ranks
        for m in self._stage_counts(len(stages)):
            for views in itertools.product(*per_stage):
                layouts = tuple(
                    StageLayout(v, Constraints(self.options.forbid, pins=self._pins(v)))
                    for v in views
                )
                name = f"{stages_text(views)}, m={m}"
                yield name, [Candidate(name, ends, layouts, m)]

    def _stage_counts(self, n_stages: int) -> list[int]:
        """Microbatch counts worth trying with stages."""
        batch = self.analysis.batch
        if isinstance(self.options.microbatches, int):
            batch.check_divides(self.options.microbatches)
            return [self.options.microbatches]
        if batch.size == 0 or batch.broken_at is not None:
            return [1]
        limit = min(batch.size, 8 * n_stages)
        return [m for m in (2**i for i in range(10)) if m <= limit and batch.size % m == 0]

    def _views(self, first_rank: int, n_ranks: int) -> list[LogicalMesh]:
        """How consecutive ranks may be seen: every dp x tp, or the mesh as it is given."""
        links, device = self.hardware.links, self.hardware.device
        if n_ranks == self.mesh.n_ranks:
            return logical_views(self.mesh, links, device, self.options.mesh_shape)
        if self.options.mesh_shape == "as-given":
            assert self.mesh.axis_names is not None
            shape = submesh_shape(self.mesh, first_rank, n_ranks)
            axes = dict(zip(self.mesh.axis_names, shape, strict=True))
            return [factored_view(self.mesh, links, device, axes, first_rank)]
        return [
            factored_view(self.mesh, links, device, {"dp": n_ranks // tp, "tp": tp}, first_rank)
            for tp in range(1, n_ranks + 1)
            if n_ranks % tp == 0
        ]

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

    def _manual(self, manual: Manual) -> Iterator[_Tries]:
        n_ranks = manual.dp * manual.tp * manual.pp
        if n_ranks != self.mesh.n_ranks:
            sizes = f"dp={manual.dp}, tp={manual.tp}, pp={manual.pp}"
            raise MeshError(
                f"Manual({sizes}) places {n_ranks} ranks, the mesh has {self.mesh.n_ranks}",
                hint="make dp * tp * pp the number of devices",
            )
        if self.options.force:
            raise OptionError("manual is the whole recipe; force cannot be combined with it")
        self._check_rows(manual)
        forbid = self.options.forbid | (frozenset() if manual.sp else {"sequence"})
        limits = Constraints(forbid, ("data", "tensor"), manual.zero)
        links, device = self.hardware.links, self.hardware.device
        axes = {"dp": manual.dp, "tp": manual.tp}
        views = [
            factored_view(self.mesh, links, device, axes, k * manual.dp * manual.tp)
            for k in range(manual.pp)
        ]
        ends = (
            (n_operators(self.analysis.program),)
            if manual.pp == 1
            else balanced_ends(self.analysis, manual.pp)
        )
        layouts = tuple(StageLayout(view, limits) for view in views)
        tries = [
            Candidate(f"manual recipe, m={m}", ends, layouts, m)
            for m in self._microbatch_counts(views[0], limits)
        ]
        if manual.pp == 1:
            tries = [replace(c, name="manual recipe") for c in tries]
            yield "manual recipe", tries
        else:  # more microbatches make the bubble smaller, and cost more launches
            yield from ((c.name, [c]) for c in tries)

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


def _first_that_fits(evaluator: Evaluator, tries: Sequence[Candidate]) -> Solved | InfeasibleError:
    last: InfeasibleError | None = None
    for candidate in tries:
        try:
            return evaluator.solve(candidate)
        except InfeasibleError as error:
            last = error
    assert last is not None
    return last


def axes_text(view: LogicalMesh) -> str:
    return " x ".join(f"{name}={size}" for name, size in view.axes.items())


def stages_text(views: Sequence[LogicalMesh]) -> str:
    """`2 stages (dp=1 x tp=2 | dp=2 x tp=1)`; equal ones once."""
    texts = [axes_text(view) for view in views]
    within = texts[0] if len(set(texts)) == 1 else " | ".join(texts)
    return f"{len(views)} stages ({within})"
