"""Candidates with several stages: those of the recipes, and checks that hold for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.cost.hardware.hardware import Hardware
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.joint import JointSearch
from autopar.passes.inter.recipes import recipe_candidates
from autopar.passes.intra.priced import Prices
from tests.helpers.harness import language_model, tiny_gpt2


def gpt2(n_layers: int = 4) -> Analysis:
    return language_model(tiny_gpt2, n_layers)


def joint_search_on(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    options: Options,
    budget_bytes: float | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> JointSearch:
    """A new search for plans with two stages or more."""
    budget_bytes = budget_bytes or options.memory_limit or hardware.memory_limit_bytes
    return JointSearch.of(analysis, mesh, hardware, options, budget_bytes, 2, report, Prices())


def recipes(
    analysis: Analysis, mesh: Mesh, hardware: Hardware, options: Options, *how: Any
) -> list[Candidate]:
    """`recipe_candidates` with a new search; `how` is passed on."""
    return recipe_candidates(joint_search_on(analysis, mesh, hardware, options), *how)


def assert_covers(candidate: Candidate, mesh: Mesh) -> None:
    """Every rank once, in order, no stage across nodes unless it has whole nodes."""
    ranks = [r for stage in candidate.stages for r in stage.view.ranks]
    assert ranks == list(range(mesh.n_ranks))
    assert len(candidate.ends) == len(candidate.stages)
    for stage in candidate.stages:
        nodes = {mesh.node_of(r) for r in stage.view.ranks}
        assert len(nodes) == 1 or stage.view.n_ranks % mesh.devices_per_node == 0
        assert stage.view.first_rank % min(stage.view.n_ranks, mesh.devices_per_node) == 0
