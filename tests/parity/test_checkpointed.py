"""Checkpointed regions are recomputed as the user wrote them, and change no number."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import autopar
from autopar import Manual, Plan
from autopar.options import Options
from autopar.passes.analysis import Analysis, Recomputable, Run, aligned_runs, find_runs
from tests.helpers.captures import captured
from tests.helpers.jobs import (
    gpt2,
    machine,
    tokens,
)
from tests.helpers.models import checkpointed as models
from tests.helpers.nightly import nightly, one_in
from tests.parity.table import TOLERANCE

MESH = machine((1, 2))


@one_in(6)
@pytest.mark.parametrize("how", models.HOWS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_parity_with_the_users_module(how: str) -> None:
    options: dict[str, Any] = {"manual": Manual(dp=2)} if how == "part" else {}
    report = autopar.verify(models.stack(how), MESH, models.batch(), precision="fp64", **options)
    report.raise_if_wrong()
    assert report.tolerance == report.capture_tolerance == TOLERANCE
    assert recomputed(report.plan) or how == "first"


def recomputed(plan: Plan) -> dict[str, str]:
    return dict(plan.data.stages[0].recomputed)


@nightly
def test_transformers_models_are_planned_as_with_recompute_full() -> None:
    def plan(model: nn.Module, **options: Any) -> Plan:
        return autopar.plan(model, MESH, tokens(0), manual=Manual(dp=2), **options)

    on = gpt2(2).train()
    on.activation_checkpointing_enable()  # type: ignore[operator]
    asked, none = plan(on), plan(gpt2(2))
    full = autopar.plan(gpt2(2), MESH, tokens(0), manual=Manual(dp=2, recompute="full"))
    assert recomputed(asked) == recomputed(full)
    assert len(recomputed(asked)) == 2 and not recomputed(none)
    assert asked.predicted.peak_bytes == full.predicted.peak_bytes < none.predicted.peak_bytes


def test_options_come_before_the_users_regions() -> None:
    def modes(**options: Any) -> set[str]:
        plan = autopar.plan(models.stack("blocks"), MESH, models.batch(), **options)
        return set(recomputed(plan).values())

    assert modes() == modes(recompute="full") != modes(recompute="selective")
    assert modes(recompute="none") == modes(forbid=("recompute",)) == set()


def test_only_the_users_blocks_run_again() -> None:
    plan = autopar.plan(models.stack("second"), MESH, models.batch())
    assert [key.split("/")[0] for key in recomputed(plan)] == ["blocks.1.norm", "blocks.3.norm"]
    part = autopar.plan(models.stack("part"), MESH, models.batch())
    assert recomputed(part)["blocks.0.up/linear#0"] == "full until /tanh#0"
    policy = autopar.plan(models.stack("selective"), MESH, models.batch())
    assert all(text.startswith("selective until") for text in recomputed(policy).values())
    assert len(recomputed(policy)) == models.N_BLOCKS


def aligned(how: str, n_blocks: int) -> tuple[Run, tuple[Run, ...]]:
    analysis = Analysis.of(captured(models.stack(how, n_blocks), models.batch()))
    regions = Recomputable.of(analysis, Options.of())
    (run,) = find_runs(analysis)
    return run, aligned_runs(analysis, regions) if regions else ()


@one_in(3)
@pytest.mark.parametrize(
    ("how", "n_own"), [("blocks", 1), ("second", 2), ("part", 1), ("pairs", 2)]
)
def test_blocks_stand_for_blocks_with_equal_regions_only(how: str, n_own: int) -> None:
    """Blocks of a run may be several blocks of the model."""
    run, found = aligned(how, 16)
    assert [r.period for r in found] == [n_own * run.period]
    assert found[0].count in (16 // n_own - 1, 16 // n_own)


@nightly
@pytest.mark.parametrize(("how", "n_blocks"), [("pairs", 6), ("pairs", 12), ("second", 12)])
def test_folded_or_not_the_plan_is_the_same(how: str, n_blocks: int) -> None:
    """The whole ILP has every block for itself."""

    def plan(solver: str) -> Plan:
        return autopar.plan(
            models.stack(how, n_blocks), MESH, models.batch(), mesh_shape="as-given", solver=solver
        )

    folded, whole = plan("auto"), plan("ilp")
    assert recomputed(folded) == recomputed(whole)
    assert folded.predicted.step_time_s == pytest.approx(whole.predicted.step_time_s, rel=1e-9)
    assert folded.predicted.peak_bytes == whole.predicted.peak_bytes
