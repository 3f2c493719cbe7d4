"""Recompute that the planner chooses: if memory binds, per block, together with placements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Manual, Plan
from autopar.errors import InfeasibleError
from autopar.options import Recompute
from tests.helpers.machines import one_node
from tests.helpers.models.recompute_models import recomputing
from tests.helpers.ranks import TOLERANCE, pipeline_step
from tests.helpers.recompute_plans import N_LAYERS, batch, model, modes_of, planned_gpt2

MODES: tuple[Recompute, ...] = ("selective", "full")


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_refused_is_planned_and_right(n: int) -> None:
    limit = int(0.7 * planned_gpt2(n, None).predicted.peak_bytes)
    with pytest.raises(InfeasibleError, match="allow ZeRO and recompute"):
        planned_gpt2(n, limit, "none")
    plan = planned_gpt2(n, limit)
    assert plan.predicted.peak_bytes <= limit
    assert 0 < modes_of(plan).total() <= N_LAYERS
    assert plan.bound is not None
    program, pipeline = plan.bound.analysis.program, plan.bound.pipeline
    assert pipeline.stages[0].segments
    found, _ = pipeline_step(program, pipeline, batch(), 0)
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}


def test_less_memory_is_more_recompute_and_never_faster() -> None:
    free = planned_gpt2(1, None)
    assert not modes_of(free)
    limit = int(1.05 * free.predicted.peak_bytes)
    assert planned_gpt2(1, limit).data == replace(free.data, limit_bytes=limit)
    before_s, again_s = free.objective_s, 0.0
    for share in (0.9, 0.75, 0.6, 0.45):
        plan = planned_gpt2(1, int(share * free.predicted.peak_bytes))
        assert plan.predicted.peak_bytes <= share * free.predicted.peak_bytes
        assert plan.objective_s >= before_s
        # On one device only recompute trades time for memory.
        assert modes_of(plan)
        assert plan.objective_s - free.objective_s >= again_s
        before_s, again_s = plan.objective_s, plan.objective_s - free.objective_s
    assert again_s > 0


def test_never_worse_than_without() -> None:
    """Also if placements fit without recompute."""
    limit = int(0.95 * planned_gpt2(2, None, forbid="zero3").predicted.peak_bytes)
    without = planned_gpt2(2, limit, "none", "zero3")
    assert not modes_of(without)
    assert planned_gpt2(2, limit, forbid="zero3").objective_s <= without.objective_s * (1 + 1e-9)


def test_what_is_forbidden_is_not_chosen() -> None:
    limit = int(0.7 * planned_gpt2(1, None).predicted.peak_bytes)
    options: list[dict[str, Any]] = [
        {"forbid": "recompute"},
        {"recompute": "none"},
        {"manual": Manual()},
    ]
    for option in options:
        with pytest.raises(InfeasibleError, match="no plan fits in"):
            autopar.plan(
                model("plain"), one_node(1), batch(), precision="fp64", microbatches=1,
                memory_limit=limit, **option,
            )  # fmt: skip


def test_a_plan_that_chose_is_saved_and_explained(tmp_path: Path) -> None:
    plan = planned_gpt2(1, int(0.6 * planned_gpt2(1, None).predicted.peak_bytes))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").bind(model("plain"))
    assert again.code() == plan.code()
    assert again.predicted == plan.predicted
    for mode, count in modes_of(plan).items():
        assert f"runs again in backward: {count} in mode {mode}: " in plan.explain()
    several = planned_gpt2(2, int(0.7 * planned_gpt2(2, None).predicted.peak_bytes))
    words = several.explain("transformer.h.1.mlp.c_fc.weight")
    assert "recompute is not counted" in words


@pytest.mark.parametrize("mode", [*MODES, "attention-core"])
def test_a_mode_that_is_asked_for_is_in_all_that_is_known(mode: Recompute) -> None:
    """On one device there is one placement: planning with a mode equals adding the mode to a plan,
    and the problem's seconds are those of the step."""
    plan, laid_over = planned_gpt2(1, None, mode), recomputing(planned_gpt2(1, None, "none"), mode)
    assert plan.code() == laid_over.code()
    assert plan.predicted == laid_over.predicted
    without = planned_gpt2(1, None, "none")
    foretold_s = plan.objective_s - without.objective_s
    played_s = plan.predicted.step_time_s - without.predicted.step_time_s
    assert foretold_s == pytest.approx(played_s, rel=1e-6)
    # The problem counts values twice that views share, so the limit is a little higher.
    peak_bytes = plan.predicted.peak_bytes
    assert planned_gpt2(1, int(1.02 * peak_bytes), mode).predicted.peak_bytes == peak_bytes
    with pytest.raises(InfeasibleError):
        planned_gpt2(1, int(0.99 * peak_bytes), mode)


# -- stages ----------------------------------------------------------------------------------------


def staged(limit: int | None, recompute: str = "auto") -> Plan:
    """One rank per stage, so that no placement saves memory."""
    return autopar.plan(
        model("plain"), one_node(2), batch(), precision="fp64", stages=2, microbatches=4,
        memory_limit=limit, recompute=recompute,
    )  # fmt: skip


def test_stages_that_fit_with_recompute_alone() -> None:
    free = staged(None)
    assert not modes_of(free)
    limit = int(0.75 * free.predicted.peak_bytes)
    with pytest.raises(InfeasibleError):
        staged(limit, "none")
    plan = staged(limit)
    assert len(plan.stages) == 2 and plan.predicted.peak_bytes <= limit
    assert modes_of(plan) and plan.objective_s > free.objective_s
    assert plan.bound is not None
    found, _ = pipeline_step(plan.bound.analysis.program, plan.bound.pipeline, batch(), 0)
    assert {name: error for name, error in found.items() if not error <= TOLERANCE} == {}
