"""The bar of time: what the step is made of. Memory is in `memory.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cost.laws import CostModel
from autopar.cost.price import step_shares
from autopar.cost.simulate import Timeline
from autopar.program.lines import Pipeline

_NAMES = {
    "matmul": "matmuls",
    "attention": "attention",
    "pointwise": "pointwise and other operators",
    "conversion": "parameters made for use",
    "slowdown": "slower beside communication",
    "other collective": "tied gradients and the loss",
    "wait": "waits for messages",
    "idle": "bubble",
    "optimizer": "optimizer",
    "slowest rank": "waits for the slowest rank",
}


def time_bar(pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline) -> dict[str, Any]:
    """Seconds of the busiest device, by kind: `parts` add up to the step, `hidden` runs beside."""
    shares = step_shares(pipeline, costs, timeline)
    return {
        "device": shares.device,
        "step_time_s": shares.step_time_s,
        "parts": [
            {
                "kind": share.kind,
                "name": f"collectives over {share.axes}" if share.axes else _NAMES[share.kind],
                "time_s": share.time_s,
            }
            for share in shares.parts
        ],
        "hidden": [
            {"kind": "collective", "name": f"collectives over {s.axes}", "time_s": s.time_s}
            for s in shares.hidden
        ],
    }
