"""A file whose equal blocks are called in a loop holds what its lines hold, and no longer."""

from __future__ import annotations

import pytest

import autopar
from autopar import Manual
from autopar.cost.price import peak_of_stage
from tests.helpers.jobs import machine
from tests.helpers.nightly import nightly
from tests.helpers.recompute_plans import batch, model
from tests.helpers.whole_steps import WholeStep


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=nightly)])
def test_live_bytes_of_a_step(recompute: str) -> None:
    manual = Manual(recompute=recompute)
    plan = autopar.plan(model("plain"), machine((1, 1)), batch(), manual=manual)
    (text,) = plan.code().values()
    assert "for i in range(" in text
    assert plan.bound is not None
    pipeline = plan.bound.pipeline
    measured, _ = WholeStep.of(plan.bound.analysis.program, pipeline, batch()).bytes()
    assert measured == pytest.approx(peak_of_stage(pipeline, 0, "adamw"), rel=0.03)
