"""Gaps that repeated blocks leave under a budget are closed with all blocks apart."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.passes.analysis import Analysis
from autopar.passes.intra import Chosen, PlacementRequest
from autopar.passes.intra import chooser as choose
from autopar.passes.intra.chooser import FOLDED_GAP_GOAL
from autopar.plans import PlanData
from tests.helpers.harness import random_tokens, tiny_gpt2

N_BLOCKS = 4  # as many as are folded
# Blocks alone leave a gap within it.
LIMIT_BYTES = 400_000


def planned(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[PlanData, list[Chosen]]:
    """The plan, and the choices made for the whole, unrolled program."""
    written_out: list[Chosen] = []
    choose_all = choose.choose

    def noted(analysis: Analysis, ask: PlacementRequest, *rest: Any) -> Chosen:
        found = choose_all(analysis, ask, *rest)
        if analysis.whole is None and ask.cost.mesh.n_ranks == 2:
            written_out.append(found)
        return found

    monkeypatch.setattr(choose, "choose", noted)
    limits: dict[str, Any] = {"memory_limit": LIMIT_BYTES, "recompute": "none", **options}
    plan = autopar.plan(tiny_gpt2(N_BLOCKS), (1, 2), random_tokens(0), **limits)
    return plan.data, written_out


@pytest.mark.usefixtures("nothing_hidden")
def test_the_gap_of_what_wins_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, written_out = planned(monkeypatch, stages=1, tolerance=0.0)
    assert any(chosen.gap <= FOLDED_GAP_GOAL for chosen in written_out)
    assert plan.objective_s in [chosen.objective_s for chosen in written_out]
