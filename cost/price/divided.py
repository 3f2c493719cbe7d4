"""Every collective of a simulated step, divided: the seconds that wait for it, and those beside it.

    exposed_s of a call = its time, if compute waits for it; else its time x the share of its part
                          of the step that is not hidden

Where only some of the overlapped collectives of a part are hidden, each is hidden to one share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, overlap_of, overlapped_of
from autopar.cost.simulate import Timeline
from autopar.program.communication import RankCall
from autopar.program.lines import StageProgram


@dataclass(frozen=True)
class DividedCall:
    """Seconds of a step of one call: those that compute waits for, and those beside it."""

    call: RankCall
    exposed_s: float
    hidden_s: float


def divided_calls(
    program: StageProgram, cost: CostModel, timeline: Timeline, stage: int
) -> Iterator[DividedCall]:
    """Every call of a step of a stage that has a device of its own, its microbatches together."""
    times, n = timeline.record.stages[stage], program.n_microbatches
    calls = overlap_of(program, cost)

    def divided(of: Calls, factor: float, hidden_s: float) -> Iterator[DividedCall]:
        overlapped_s = overlapped_of(of)
        share = hidden_s / overlapped_s if overlapped_s else 0.0
        for call, time_s in sorted(of, key=lambda timed: timed.call.is_beside):
            of_call = share if call.is_beside else 0.0
            yield DividedCall(call, factor * time_s * (1 - of_call), factor * time_s * of_call)

    inside_s = 0.0
    backward = calls.backward + calls.weights
    for part, own in ((times.forward, calls.forward), (times.of("backward"), backward)):
        hidden_s = part.duration(times.overlap_slowdown_fraction).hidden_s
        yield from divided(own, n, hidden_s)
        inside_s += n * hidden_s
    yield from divided(calls.before, 1.0, 0.0)
    sync_hidden_s = max(timeline.devices[stage].hidden_s - inside_s, 0.0)
    yield from divided(calls.step, 1.0, sync_hidden_s)
