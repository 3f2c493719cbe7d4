"""All plans that the planner may choose from, solved and simulated, to test its choice against:
cuts between layers, submeshes, views and microbatches; placements in a stage are the solver's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.price import StepPricer
from autopar.errors import BatchError, InfeasibleError
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, compute_dtype, find_runs
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    find_layers,
    microbatch_counts,
    plain_order,
    stage_without_parameters,
    submesh_sizes,
    views_of,
)
from autopar.passes.intra import Constraints
from autopar.passes.search import Evaluator, Planner, PlanningResult, Simulator, Solved
from tests.helpers.captures import captured
from tests.helpers.harness import Mlp, random_tokens, tiny_gpt2
from tests.helpers.machines import two_tiers

MODELS = {"mlp": lambda: Mlp(width=256, n_layers=4), "gpt2": lambda: tiny_gpt2(2)}


def batch_of(model: str) -> dict[str, torch.Tensor]:
    if model == "gpt2":
        return random_tokens(0)
    return {name: torch.zeros(64, 256, dtype=torch.float64) for name in ("x", "y")}


@cache
def analysis_of(model: str) -> Analysis:
    torch.manual_seed(0)
    return Analysis.of(captured(MODELS[model](), batch_of(model), precision="fp64"))


def choices_of(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], options: Options
) -> Choices:
    """Devices are slower for GPT-2, whose matmuls are smaller."""
    mesh = two_tiers(shape, s_per_byte, 1e10 if model == "mlp" else 1e9)
    analysis = analysis_of(model).set_schedule(plain_order(options))
    return Choices(analysis, mesh, options)


@dataclass(frozen=True)
class Choices:
    """All plans of one program on one machine."""

    analysis: Analysis
    mesh: Mesh
    options: Options

    @cached_property
    def hardware(self) -> Hardware:
        found = resolve(self.mesh, compute_dtype(self.analysis))
        return replace(found, kernels="compiled") if self.options.compiles else found

    def planned(self) -> PlanningResult:
        """The planner's choice."""
        return Planner(self.analysis, self.mesh, self.hardware, self.options).run()

    @cached_property
    def _pricer(self) -> StepPricer:
        return StepPricer(self.mesh, self.hardware, self.options.optimizer)

    @cached_property
    def evaluator(self) -> Evaluator:
        budget_bytes = self.options.memory_limit or self.hardware.memory_limit_bytes
        return Evaluator(self.analysis, self.options, self.hardware, budget_bytes)

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.evaluator, self._pricer)

    def simulated(self, candidate: Candidate) -> Solved:
        """A candidate solved within the budget; raises if it does not fit or divide."""
        simulator = self.simulator
        placed = simulator.evaluator.placed(candidate, simulator.evaluator.budget_bytes)
        return simulator.simulated(placed)

    def step_times_s(self) -> dict[str, float]:
        """Name -> simulated step, of every plan that fits."""
        found: dict[str, float] = {}
        for candidate in self.candidates():
            try:
                found[candidate.name] = self.simulated(candidate).step_time_s
            except (InfeasibleError, BatchError):
                continue
        return found

    def candidates(self) -> Iterator[Candidate]:
        ends = find_layers(self.analysis, find_runs(self.analysis)).ends
        counts = microbatch_counts(self.analysis, self.options, self.mesh.n_ranks)
        for sizes in self.submeshes():
            for inner in itertools.combinations(ends[:-1], len(sizes) - 1):
                cuts = (*inner, ends[-1])
                if stage_without_parameters(self.analysis, cuts) is not None:
                    continue
                for views, m in itertools.product(self.views(sizes), counts):
                    yield self._candidate(cuts, views, m)

    def submeshes(self) -> Iterator[tuple[int, ...]]:
        """Numbers of ranks of consecutive stages."""
        yield (self.mesh.n_ranks,)
        if self.options.stages != 1 and "pipeline" not in self.options.forbid:
            yield from self._submeshes_from(0)

    def _submeshes_from(self, first: int) -> Iterator[tuple[int, ...]]:
        each, n = self.mesh.devices_per_node, self.mesh.n_ranks
        if first == n:
            yield ()
        for size in submesh_sizes(self.mesh):
            inside = first // each == (first + size - 1) // each
            if first + size <= n and (inside or first % each == size % each == 0):
                for rest in self._submeshes_from(first + size):
                    yield (size, *rest)

    def views(self, sizes: Sequence[int]) -> Iterator[tuple[LogicalMesh, ...]]:
        """The views of all stages; those that differ only in axis names count as one."""
        of_stages = []
        for first, size in zip(itertools.accumulate((0, *sizes)), sizes, strict=False):
            distinct: dict[object, LogicalMesh] = {}
            for view in views_of(self.mesh, self.hardware, self.options, first, size):
                axes = tuple((view.sizes[a], view.links[a]) for a in view.active_axes)
                distinct.setdefault(axes, view)
            of_stages.append(distinct.values())
        yield from itertools.product(*of_stages)

    def _candidate(
        self, cuts: tuple[int, ...], views: Sequence[LogicalMesh], n_microbatches: int
    ) -> Candidate:
        limits = Constraints(self.options.forbid)
        seen = " | ".join("x".join(map(str, view.sizes)) for view in views)
        return Candidate(
            f"{seen}, cut at {cuts}, m={n_microbatches}",
            cuts,
            tuple(StageLayout(view, limits) for view in views),
            n_microbatches,
            schedule=plain_order(self.options),
        )
