"""How much of each kind of communication is hidden on the busiest device of a simulated step.

    gathers of parameters    once a step, and ZeRO-3's
    gradient sync            once a step, per microbatch, and ZeRO-3's
    activations              reshards inside a stage, forward and backward
    messages                 to other stages; what is waited for of them is exposed

What is hidden in one part of a step is divided among its collectives by their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, calls_time_s, overlap_of
from autopar.cost.simulate import Timeline
from autopar.program import Pipeline


@dataclass(frozen=True)
class HiddenKind:
    """Seconds of a kind of communication in a step, and those of them that are hidden."""

    name: str
    time_s: float
    hidden_s: float


def hidden_of(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline
) -> tuple[HiddenKind, ...]:
    """The kinds that the busiest device has; `timeline` is that of the pipeline."""
    stage = timeline.busiest_device
    cost, totals, m = costs[stage], timeline.devices[stage], pipeline.n_microbatches
    times, calls = timeline.record.stages[stage], overlap_of(pipeline.stages[stage])

    def seconds(of: Calls, *phases: str) -> float:
        return calls_time_s((c for c in of if c.phase in phases), cost)

    found = {name: [0.0, 0.0] for name in ("param_gather", "grad_sync", "activations")}
    inside_s = 0.0
    for part, apart in ((times.forward, calls.forward), (times.of("backward"), calls.backward)):
        hidden_s = part.duration(times.overlap_slowdown_fraction).hidden_s
        inside_s += m * hidden_s
        share = hidden_s / part.overlapped_s if part.overlapped_s else 0.0
        every = (*apart.waited, *apart.overlapped)
        for phase in ("param_gather", "grad_sync"):
            found[phase][0] += m * seconds(every, phase)
            found[phase][1] += m * share * seconds(apart.overlapped, phase)
        found["activations"][0] += m * seconds(every, "forward", "backward")
    found["param_gather"][0] += seconds(calls.before, "param_gather")
    found["grad_sync"][0] += times.sync_s + times.after.collectives_s
    found["grad_sync"][1] += max(totals.hidden_s - inside_s, 0.0)
    sent_s = totals.sending_s
    rows = (
        HiddenKind("gathers of parameters", *found["param_gather"]),
        HiddenKind("gradient sync", *found["grad_sync"]),
        HiddenKind("activations", *found["activations"]),
        HiddenKind("messages", sent_s, max(sent_s - totals.waited_s, 0.0)),
    )
    return tuple(row for row in rows if row.time_s > 0)
