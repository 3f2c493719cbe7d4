"""A solver that gives up leaves other plans, and its candidate's bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.cost.hardware import resolve
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.search import Planner
from autopar.passes.search.evaluator import Evaluator
from autopar.passes.solvers.problem import TimeLimitError
from tests.helpers.harness import Mlp, random_rows


def planner() -> Planner:
    analysis = Analysis.of(capture(Mlp(n_layers=2), random_rows(0, "x", "y"), precision="fp64"))
    mesh = Mesh((1, 2), hardware="a100-80gb")
    return Planner(analysis, mesh, resolve(mesh, torch.float64), Options.of(stages=1))


def give_up(self: Evaluator, candidate: Any, *_: Any) -> Any:
    raise TimeLimitError("the ILP found no feasible choice", hint="raise time_limit_s")


def test_recipes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, chosen = Evaluator.placed, planner().run()

    def searched(self: Evaluator, candidate: Any, *given: Any) -> Any:
        give = placed if candidate.recipe else give_up
        return give(self, candidate, *given)

    monkeypatch.setattr(Evaluator, "placed", searched)
    found = planner().run()
    assert found.solved.candidate.recipe and found.bound_s is not None
    assert found.bound_s <= chosen.solved.step_time_s
    assert any("no placements found in time" in str(row) for row in found.alternatives)


def test_without_any_plan_it_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "placed", give_up)
    with pytest.raises(TimeLimitError, match="no feasible choice"):
        planner().run()
