"""When recompute is tried: where memory costs much, also where that shows in simulation alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.binding import predict_on
from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.passes.evaluate import Scored
from autopar.passes.planner import MEMORY_COSTS, Planner
from autopar.passes.simulated import Simulator, Solved
from tests.test_joint import cluster, gpt2

Fitting = Callable[[Solved], Solved | float]


def fits(solved: Solved) -> Solved:
    return solved


def does_not_fit(solved: Solved) -> Solved:
    raise InfeasibleError("planted")


def is_slower(solved: Solved) -> float:
    return solved.step_time_s


def fits_for_much(solved: Solved) -> Solved:
    step_time_s = 1.01 * MEMORY_COSTS * solved.step_time_s
    return replace(solved, predicted=replace(solved.predicted, step_time_s=step_time_s))


@pytest.mark.parametrize(
    ("fitting", "is_tried"),
    [(fits, False), (does_not_fit, True), (is_slower, True), (fits_for_much, True)],
)
def test_recompute_is_tried_where_the_best_does_not_fit_for_little(
    monkeypatch: pytest.MonkeyPatch, fitting: Fitting, is_tried: bool
) -> None:
    """By its score it does: there is as much memory as anyone could want."""
    mesh, asked, tried = cluster(2), list[float](), list[str]()
    fitting_of = Simulator.fitting

    def first(simulator: Simulator, scored: Scored, limit_s: float) -> Solved | float:
        asked.append(limit_s)
        found = fitting_of(simulator, scored, limit_s)
        assert isinstance(found, Solved)
        return fitting(found) if len(asked) == 1 else found

    monkeypatch.setattr(Simulator, "fitting", first)
    monkeypatch.setattr(Planner, "_add_recomputed", lambda self, errors: tried.append("again"))
    planner = Planner(gpt2(), mesh, Options.of(), predict_on(mesh, gpt2(), "adamw", ()))
    best = planner.run().solved
    assert tried == ["again"] * is_tried
    # More than memory may cost is not worth knowing.
    assert asked[0] == pytest.approx(MEMORY_COSTS * best.step_time_s, rel=0.05)
