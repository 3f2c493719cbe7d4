"""How much of each kind of communication is hidden on the busiest device of a simulated step.

gathers of parameters    once a step, and ZeRO-3's
gradient sync            once a step, per microbatch, and ZeRO-3's
activations              reshards inside a stage, forward and backward
messages                 to other stages; what is waited for of them is exposed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.divided import divided_calls
from autopar.cost.simulate import Timeline
from autopar.program.lines import Pipeline


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
    totals = timeline.busiest
    found = {name: [0.0, 0.0] for name in ("param_gather", "grad_sync", "activations")}
    for divided in divided_calls(pipeline, costs, timeline, timeline.busiest_device):
        phase = divided.call.phase
        name = "activations" if phase in ("forward", "backward") else phase
        if name in found:
            found[name][0] += divided.exposed_s + divided.hidden_s
            found[name][1] += divided.hidden_s
    sent_s = totals.sending_s
    rows = (
        HiddenKind("gathers of parameters", *found["param_gather"]),
        HiddenKind("gradient sync", *found["grad_sync"]),
        HiddenKind("activations", *found["activations"]),
        HiddenKind("messages", sent_s, max(sent_s - totals.waited_s, 0.0)),
    )
    return tuple(row for row in rows if row.time_s > 0)
