"""Axes of plans that the search finds are named after what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.options import Options
from autopar.passes.search import Planner, axis_names
from autopar.passes.search.axis_names import AxisNames
from tests.helpers.candidates import gpt2
from tests.helpers.machines import cluster, hardware_of


def test_chunks_of_a_rank_give_an_axis_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if all of them split sequences on it, it is called cp."""
    mesh, options = cluster(2), Options.of(schedule="interleaved", stages=4)
    planner = Planner(gpt2(), mesh, hardware_of(mesh), options)
    found = planner.run().solved
    found = replace(found, candidate=replace(found.candidate, recipe=""))
    of_stages = iter([(0,), (0,), (), (0,)])  # they are on devices 0, 1, 0, 1
    monkeypatch.setattr(axis_names, "context_axes", lambda program: next(of_stages))
    named = AxisNames(planner.simulator, options).named(found)
    views = [stage.cost.mesh for stage in named.stages]
    assert [layout.view for layout in named.candidate.stages] == views
    assert views[0] == views[2] and views[1] == views[3]
    assert "cp" not in views[0].names and views[1].names[0] == "cp"
