"""Recompute that the planner chooses: if memory binds, per block, together with placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Manual, Plan
from autopar.errors import InfeasibleError
from autopar.manual import Recompute
from tests.helpers.machines import one_node
from tests.helpers.models.recompute_models import recomputing
from tests.helpers.nightly import nightly, one_in
from tests.helpers.ranks import TOLERANCE, pipeline_step
from tests.helpers.recompute_plans import batch, model, modes_of, planned_gpt2, slow_links

MODES: tuple[Recompute, ...] = ("selective", "full", "attention-core")


def test_where_memory_does_not_bind_nothing_runs_again() -> None:
    free = planned_gpt2(1, None)
    assert not modes_of(free)
    limit = int(1.05 * free.predicted.peak_bytes)
    assert planned_gpt2(1, limit).data == replace(free.data, limit_bytes=limit)


def test_less_memory_is_more_recompute_and_never_faster() -> None:
    """On one device only recompute trades time for memory."""
    free = planned_gpt2(1, None)
    before_s = free.objective_s
    for share in (0.9, 0.7):
        limit = int(share * free.predicted.peak_bytes)
        with pytest.raises(InfeasibleError, match="allow ZeRO and recompute"):
            planned_gpt2(1, limit, "none")
        plan = planned_gpt2(1, limit)
        assert plan.predicted.peak_bytes <= limit
        assert 0 < modes_of(plan).total() <= 2
        assert plan.objective_s >= before_s
        before_s = plan.objective_s
    assert before_s > free.objective_s


def test_recompute_is_chosen_where_memory_costs_more() -> None:
    """Other placements fit, but take much longer."""
    limit = int(0.98 * planned_gpt2(2, None, forbid="zero3").predicted.peak_bytes)
    without = planned_gpt2(2, limit, "none", "zero3")
    plan = planned_gpt2(2, limit, forbid="zero3")
    assert modes_of(plan) and not modes_of(without)
    assert plan.predicted.step_time_s < 0.95 * without.predicted.step_time_s
    assert max(plan.predicted.peak_bytes, without.predicted.peak_bytes) <= limit


def test_a_step_that_chose_recompute_is_right() -> None:
    plan = planned_gpt2(1, int(0.7 * planned_gpt2(1, None).predicted.peak_bytes))
    assert plan.bound is not None
    pipeline = plan.bound.pipeline
    assert pipeline.stages[0].segments
    found, _ = pipeline_step(plan.bound.analysis.program, pipeline, batch(), 0)
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def test_what_is_forbidden_is_not_chosen() -> None:
    limit = int(0.7 * planned_gpt2(1, None).predicted.peak_bytes)
    options: list[dict[str, Any]] = [{"forbid": "recompute"}, {"manual": Manual()}]
    for option in options:
        with pytest.raises(InfeasibleError, match="no plan fits in"):
            autopar.plan(
                model("plain", 2), one_node(1), batch(), precision="fp64", microbatches=1,
                memory_limit=limit, **option,
            )  # fmt: skip


def test_a_plan_that_chose_is_saved_and_explained(tmp_path: Path) -> None:
    plan = planned_gpt2(1, int(0.7 * planned_gpt2(1, None).predicted.peak_bytes))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").bind(model("plain", 2))
    assert again.code() == plan.code()
    assert again.predicted == plan.predicted
    for mode, count in modes_of(plan).items():
        assert f"runs again in backward: {count} in mode {mode}: " in plan.explain()


@one_in(3)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_is_asked_for_is_in_all_that_is_known(mode: Recompute) -> None:
    """On one device there is one placement: planning with a mode equals adding the mode to a plan,
    and the problem's seconds are those of the step."""
    without = planned_gpt2(1, None, "none")
    plan, laid_over = planned_gpt2(1, None, mode), recomputing(without, mode)
    assert plan.code() == laid_over.code()
    assert plan.predicted == laid_over.predicted
    foretold_s = plan.objective_s - without.objective_s
    played_s = plan.predicted.step_time_s - without.predicted.step_time_s
    assert foretold_s == pytest.approx(played_s, rel=1e-6)
    # The problem counts values twice that views share, so the limit is a little higher.
    peak_bytes = plan.predicted.peak_bytes
    assert planned_gpt2(1, int(1.02 * peak_bytes), mode).predicted.peak_bytes == peak_bytes
    with pytest.raises(InfeasibleError):
        planned_gpt2(1, int(0.99 * peak_bytes), mode)


@nightly
def test_a_time_limit_leaves_a_plan_with_recompute_where_nothing_else_fits() -> None:
    """The first that fits, and a row for what was not tried."""
    limit = int(0.65 * planned_gpt2(2, None).predicted.peak_bytes)
    with pytest.raises(InfeasibleError):
        planned_gpt2(2, limit, "none")
    plan = autopar.plan(
        model("plain", 2), slow_links(2), batch(), precision="fp64", stages=1, microbatches=1,
        memory_limit=limit, time_limit_s=1e-9,
    )  # fmt: skip
    assert modes_of(plan)
    assert plan.predicted.peak_bytes <= limit
    assert any(row.name == "the rest" for row in plan.data.alternatives)


@nightly
def test_stages_that_fit_with_recompute_alone() -> None:
    """One rank per stage, so that no placement saves memory."""

    def staged(limit: int | None, recompute: str = "auto") -> Plan:
        return autopar.plan(
            model("plain", 2), one_node(2), batch(), precision="fp64", stages=2, microbatches=2,
            memory_limit=limit, recompute=recompute,
        )  # fmt: skip

    free = staged(None)
    assert not modes_of(free)
    limit = int(0.75 * free.predicted.peak_bytes)
    with pytest.raises(InfeasibleError):
        staged(limit, "none")
    plan = staged(limit)
    assert len(plan.stages) == 2 and plan.predicted.peak_bytes <= limit
    assert modes_of(plan) and plan.objective_s > free.objective_s
