"""A folded program does what the long one does: the same calls, and values end where they did."""

from __future__ import annotations

import pytest

from autopar.codegen import emit, source
from autopar.options import Recompute
from autopar.passes.backward import differentiate
from tests.helpers.events import events
from tests.parity.test_equal_blocks import LAYOUTS, MODELS, long, planned


@pytest.mark.parametrize("mode", [None, "full", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_calls_and_ends_are_those_of_the_long_program(
    model: str, layout: str, mode: Recompute | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(model, layout, 12 if layout == "stages" else 6, mode)
    assert plan.bound is not None
    joints = [differentiate(stage) for stage in plan.bound.pipeline.stages]
    found = [events(emit(joint), joint) for joint in joints]
    monkeypatch.setattr(source, "fold", long)
    monkeypatch.setattr(source, "with_views_inside", list)
    monkeypatch.setattr(source, "joined", list)
    for own, joint in zip(found, joints, strict=True):
        text = emit(joint)
        assert "for i in" not in text
        assert own == events(text, joint)
