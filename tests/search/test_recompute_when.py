"""When recompute is tried: where memory costs much, also where that shows in simulation alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.options import Options
from autopar.passes.search import planner
from autopar.passes.search.evaluator import Scored
from autopar.passes.search.planner import SKIP_RECOMPUTE_RATIO, Planner
from autopar.passes.search.simulator import Simulator, Solved
from tests.helpers.candidates import gpt2
from tests.helpers.machines import cluster, one_node
from tests.helpers.recompute_plans import batch, model, modes_of

Fitting = Callable[[Solved], Solved | float]


def fits(solved: Solved) -> Solved:
    return solved


def does_not_fit(solved: Solved) -> Solved:
    raise InfeasibleError("planted")


def is_slower(solved: Solved) -> float:
    return solved.step_time_s


def fits_for_much(solved: Solved) -> Solved:
    step_time_s = 1.01 * SKIP_RECOMPUTE_RATIO * solved.step_time_s
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
    fitting_of = Simulator.fit_to_budget

    def first(simulator: Simulator, scored: Scored, limit_s: float) -> Solved | float:
        asked.append(limit_s)
        found = fitting_of(simulator, scored, limit_s)
        assert isinstance(found, Solved)
        return fitting(found) if len(asked) == 1 else found

    monkeypatch.setattr(Simulator, "fit_to_budget", first)
    monkeypatch.setattr(Planner, "_add_recomputed", lambda self, errors: tried.append("again"))
    planner = Planner(gpt2(), mesh, Options.of())
    best = planner.run().solved
    assert tried == ["again"] * is_tried
    # More than memory may cost is not worth knowing.
    assert asked[0] == pytest.approx(SKIP_RECOMPUTE_RATIO * best.step_time_s, rel=0.05)


def test_what_is_found_with_recompute_when_the_time_is_up_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one device nothing else fits: the first that does is all there is."""

    def planned(limit: int | None) -> autopar.Plan:
        return autopar.plan(
            model("plain"), one_node(1), batch(), precision="fp64", stages=1, microbatches=1,
            memory_limit=limit, time_limit_s=600.0,
        )  # fmt: skip

    limit = int(0.7 * planned(None).predicted.peak_bytes)
    recomputed = Planner._recomputed

    def stopped(self: Planner) -> Iterator[Scored]:
        yield next(recomputed(self))
        raise planner._TimeUp

    monkeypatch.setattr(Planner, "_recomputed", stopped)
    plan = planned(limit)
    assert modes_of(plan) and plan.predicted.peak_bytes <= limit
    assert any(row.name == "the rest" for row in plan.data.alternatives)
