"""Candidates with several stages: those of the recipes, and checks that hold for all."""

from __future__ import annotations

from autopar.cost.hardware import Hardware
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.inter import Candidate, PipelineSpace, Source, equal_pipelines
from tests.helpers.harness import language_model, tiny_gpt2


def gpt2(n_layers: int = 4) -> Analysis:
    return language_model(tiny_gpt2, n_layers)


def pipeline_space(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    options: Options,
    budget_bytes: float | None = None,
    n_stages: int | None = None,
) -> PipelineSpace:
    """The pipelines of a program, with nothing shared with other plannings."""
    budget_bytes = budget_bytes or options.memory_limit or hardware.memory_limit_bytes
    return PipelineSpace.of(analysis, mesh, hardware, options, budget_bytes, n_stages)


def recipes(
    analysis: Analysis, mesh: Mesh, hardware: Hardware, options: Options
) -> list[Candidate]:
    """The Megatron pipelines as candidates."""
    space = pipeline_space(analysis, mesh, hardware, options)
    source: Source = "manual" if options.manual else "Megatron"
    return [pipeline.candidate for pipeline in equal_pipelines(space, source)]


def assert_covers(candidate: Candidate, mesh: Mesh) -> None:
    """Every rank once, in order, no stage across nodes unless it has whole nodes."""
    ranks = [r for stage in candidate.stages for r in stage.view.ranks]
    assert ranks == list(range(mesh.n_ranks))
    assert len(candidate.ends) == len(candidate.stages)
    for stage in candidate.stages:
        nodes = {mesh.node_of(r) for r in stage.view.ranks}
        assert len(nodes) == 1 or stage.view.n_ranks % mesh.devices_per_node == 0
