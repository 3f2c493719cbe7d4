"""Pipelines of captured models, with random legal assignments of every stage."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.cost.laws import CostModel
from autopar.mesh import Device, Link, LogicalMesh
from autopar.passes.analysis import Analysis, boundary_specs, cut
from autopar.passes.intra import Constraints, IntraOpProblem, intra_op_problem
from autopar.passes.lowering import PlacedStage, join
from autopar.placement import P, R, Spec
from autopar.program.graph import Program
from autopar.program.lines import Period, Pipeline, Strategy
from autopar.schedule import devices_of
from autopar.verifier import verify_program
from tests.helpers.harness import legal_storages, random_ranges, random_strategy
from tests.helpers.machines import AXIS_NAMES

Shapes = Sequence[tuple[int, ...]]
# One flop per second and no bandwidth limit: every time is a count.
DEVICE = Device(1.0, 1e30, 1e15, 0.0)


@dataclass(frozen=True)
class Layout:
    """How a pipeline is laid out: one mesh shape per device, the order of work, microbatches."""

    shapes: Shapes
    n_microbatches: int
    order: str = "1f1b"
    n_chunks: int = 1

    @property
    def n_stages(self) -> int:
        return len(self.shapes) * self.n_chunks

    @property
    def meshes(self) -> tuple[LogicalMesh, ...]:
        """The mesh of every stage."""
        meshes = device_meshes(self.shapes)
        return tuple(meshes[k] for k in devices_of(self.order, len(meshes), self.n_chunks))


def device_meshes(shapes: Shapes) -> tuple[LogicalMesh, ...]:
    """Meshes of consecutive ranks."""
    meshes, first = [], 0
    for shape in shapes:
        links = (Link(1.0, 1.0),) * len(shape)
        meshes.append(LogicalMesh(shape, AXIS_NAMES[len(shape)], links, DEVICE, first))
        first += meshes[-1].n_ranks
    return tuple(meshes)


def random_pipeline(
    analysis: Analysis,
    ends: Sequence[int],
    layout: Layout,
    rng: random.Random,
    with_outputs: bool = False,
    period: Period | None = None,
    recomputes: bool = False,
    constraints: Constraints | None = None,
) -> Pipeline:
    """A legal assignment of every stage; `period` for every parameter that may have it; if it
    `recomputes`, random ranges run again. A program captured for evaluation runs forward only."""
    meshes = layout.meshes
    parts = [analysis.part(program) for program in cut(analysis.program, ends, with_outputs)]
    stages: list[PlacedStage] = []
    sent: dict[str, tuple[LogicalMesh, Spec]] = {}
    for part, mesh in zip(parts, meshes, strict=True):
        # What stays on a rank arrives as it left: of R, which one rank sends, one has the value.
        handed = {
            value: Spec(tuple(P if p == R else p for p in spec.placements), spec.order)
            for value, (source, spec) in sent.items()
            if source == mesh
        }
        stages.append(
            _random_stage(
                part, mesh, layout.n_microbatches, rng, period, recomputes,
                constraints or Constraints(), handed,
            )
        )  # fmt: skip
        sent |= {value: (mesh, spec) for value, spec in stages[-1].strategy.sent.items()}
    order = layout.order if analysis.program.training else None
    pipeline = join(stages, order, with_outputs)
    for stage in pipeline.stages:
        verify_program(stage)
    return pipeline


def _random_stage(
    part: Analysis,
    mesh: LogicalMesh,
    n_microbatches: int,
    rng: random.Random,
    period: Period | None,
    recomputes: bool,
    constraints: Constraints,
    handed: Mapping[str, Spec],
) -> PlacedStage:
    cost = CostModel(mesh, torch.float64)
    problem = intra_op_problem(part, cost, n_microbatches, constraints, "adamw")
    strategy = random_strategy(part, problem, n_microbatches, rng)
    program = part.program
    strategy = replace(
        strategy,
        received={
            v: handed.get(v)
            or rng.choice(boundary_specs(strategy.types[v], mesh.sizes, "received"))
            for v in program.received
        },
        sent={
            v: rng.choice(boundary_specs(strategy.types[v], mesh.sizes, "sent"))
            for v in program.sent
        },
    )
    if period is not None:
        strategy = _with_period(part, problem, strategy, period, rng)
    if recomputes:
        strategy = replace(strategy, recomputed=random_ranges(part, rng))
    return PlacedStage(part, strategy, cost)


def _with_period(
    part: Analysis, problem: IntraOpProblem, strategy: Strategy, period: Period, rng: random.Random
) -> Strategy:
    storage = dict(strategy.storage)
    for name, legal in legal_storages(part, problem, strategy.operators).items():
        if wanted := [s for s in legal if s.period == period]:
            storage[name] = rng.choice(wanted)
    return replace(strategy, storage=storage)


def ends_before(program: Program, *modules: str) -> list[int]:
    """Cuts before the first operator of each of `modules`, in order."""
    operators = list(program.operators)
    owners = [program.keys[node.name].rpartition("/")[0] for node in operators]
    firsts = [
        next(i for i, owner in enumerate(owners) if f"{owner}.".startswith(f"{module}."))
        for module in modules
    ]
    return [*firsts, len(operators)]


def random_ends(program: Program, n_stages: int, rng: random.Random) -> list[int]:
    """Cuts anywhere."""
    n = len(list(program.operators))
    return [*sorted(rng.sample(range(1, n), n_stages - 1)), n]
