"""The two bars of the page: what the step is made of, and what memory is made of at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cost.laws import CostModel
from autopar.cost.price import peak_memory_of, step_shares
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
}
# Kinds of `cost/memory` that one reader's word covers, in the order of the bar.
_MEMORY = {
    "weights": ("parameters",),
    "gradients": ("gradients", "gradients of uses", "synced"),
    "optimizer": ("optimizer",),
    "gathered weights": ("converted", "gathered"),
    "buffers": ("workspace", "batch", "messages"),
}


def time_bar(pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline) -> dict[str, Any]:
    """Seconds of the busiest stage, by kind: `parts` add up to the step, `hidden` runs beside."""
    shares = step_shares(pipeline, costs, timeline)
    return {
        "stage": shares.stage,
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


def memory_bar(pipeline: Pipeline, optimizer: str, limit_bytes: float) -> dict[str, Any]:
    """Bytes of one rank of the fullest stage at its peak, by kind; they add up to the peak."""
    peaks = [peak_memory_of(pipeline, k, optimizer) for k in range(pipeline.n_stages)]
    stage = max(range(len(peaks)), key=lambda k: peaks[k].peak_bytes)
    peak = peaks[stage]
    left = {kind: size for kind, size in peak.parts.items() if size}
    parts = []
    for name, kinds in _MEMORY.items():
        size_bytes = sum(left.pop(kind, 0.0) for kind in kinds)
        if size_bytes:
            parts.append({"name": name, "size_bytes": size_bytes})
    if left:
        at = sum(part["name"] in ("weights", "gradients", "optimizer") for part in parts)
        parts.insert(at, {"name": "activations", "size_bytes": sum(left.values())})
    return {
        "stage": stage,
        "peak_bytes": peak.peak_bytes,
        "limit_bytes": limit_bytes,
        "at": peak.at.replace("/", " ").partition("#")[0].strip(),
        "parts": parts,
    }
