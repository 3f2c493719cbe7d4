"""When recompute is searched: where memory costs more than recompute would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import autopar
from autopar import Device, Link, Mesh, Plan
from autopar.errors import InfeasibleError
from autopar.passes.analysis import Analysis, Recomputable
from autopar.passes.intra import intra_op
from autopar.passes.intra.builder import ProblemBuilder
from autopar.passes.intra.candidates import CandidateMaker, GroupCandidates
from autopar.passes.intra.recompute_choice import add_recompute
from tests.helpers.machines import one_node
from tests.helpers.recompute_plans import batch, model, modes_of

REL = 1e-9


def planned(mesh: Mesh, limit: int | None, **options: object) -> tuple[Plan, bool]:
    """The plan, and whether recompute was searched: a problem has a mode per block."""
    with pytest.MonkeyPatch.context() as patch:
        searched = list[bool]()

        def noted(
            builder: ProblemBuilder, candidates: Sequence[GroupCandidates], maker: CandidateMaker,
            analysis: Analysis, recomputable: Recomputable,
        ) -> None:  # fmt: skip
            searched.append(recomputable.is_choice)
            add_recompute(builder, candidates, maker, analysis, recomputable)

        patch.setattr(intra_op, "add_recompute", noted)
        plan = autopar.plan(
            model("plain"), mesh, batch(), precision="fp64", stages=1, microbatches=1,
            memory_limit=limit, **options,
        )  # fmt: skip
    return plan, any(searched)


def slow_links() -> Mesh:
    """Shards of parameters are expensive to gather."""
    device = Device(1e12, 1e11, 1e10, 1e-9)
    return Mesh((1, 2), links=[Link(1e-7, 1e-9)] * 2, device=device)


def peak_bytes(mesh: Mesh) -> float:
    return planned(mesh, None)[0].predicted.peak_bytes


@pytest.mark.usefixtures("nothing_hidden")
@pytest.mark.parametrize("share", [None, 1.2])
def test_recompute_is_not_searched_where_memory_does_not_bind(share: float | None) -> None:
    mesh = one_node(2)
    free, _ = planned(mesh, None)
    limit = None if share is None else int(share * free.predicted.peak_bytes)
    plan, is_searched = planned(mesh, limit)
    without, _ = planned(mesh, limit, recompute="none")
    assert not is_searched and not modes_of(plan)
    assert replace(plan.data, alternatives=()) == replace(without.data, alternatives=())
    assert plan.objective_s <= free.objective_s * (1 + REL)


def test_recompute_is_searched_where_memory_costs_much() -> None:
    """Without it there is a plan, which takes much more than without a limit."""
    mesh = slow_links()
    limit = int(0.98 * planned(mesh, None, forbid="zero3")[0].predicted.peak_bytes)
    plan, is_searched = planned(mesh, limit, forbid="zero3")
    without, _ = planned(mesh, limit, forbid="zero3", recompute="none")
    assert is_searched and modes_of(plan) and not modes_of(without)
    assert plan.predicted.step_time_s < 0.95 * without.predicted.step_time_s
    assert max(plan.predicted.peak_bytes, without.predicted.peak_bytes) <= limit


@pytest.mark.parametrize("share", [0.999, 0.9])
def test_recompute_is_searched_where_nothing_else_fits(share: float) -> None:
    """On one device placements have no choice."""
    mesh = one_node(1)
    limit = int(share * peak_bytes(mesh))
    with pytest.raises(InfeasibleError, match="no plan fits in"):
        planned(mesh, limit, recompute="none")
    plan, is_searched = planned(mesh, limit)
    assert is_searched and modes_of(plan)
    assert plan.predicted.peak_bytes <= limit


def test_a_time_limit_leaves_a_plan_with_recompute_where_nothing_else_fits() -> None:
    """The first that fits, and a row for what was not tried."""
    mesh = one_node(2)
    limit = int(0.7 * peak_bytes(mesh))
    with pytest.raises(InfeasibleError):
        planned(mesh, limit, recompute="none", time_limit_s=1e-9)
    plan, _ = planned(mesh, limit, time_limit_s=1e-9)
    assert modes_of(plan)
    assert plan.predicted.peak_bytes <= limit
    assert any(row.name == "the rest" for row in plan.data.alternatives)
    whole, _ = planned(mesh, limit)
    assert all(row.name != "the rest" for row in whole.data.alternatives)
    assert whole.predicted.step_time_s <= plan.predicted.step_time_s * (1 + REL)
