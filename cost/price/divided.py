"""Every collective of a simulated step, divided: the seconds that wait for it, and those beside it.

    exposed_s of a call = its time, if compute waits for it; else its time x the share of its part
                          of the step that is not hidden

Where only some of the overlapped collectives of a part are hidden, each is hidden to one share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, overlap_of
from autopar.cost.simulate import Timeline
from autopar.program import RankCall, StageProgram


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
    times, calls, n = timeline.record.stages[stage], overlap_of(program), program.n_microbatches

    def divided(of: Calls, factor: float, share: float) -> Iterator[DividedCall]:
        for call in of:
            time_s = factor * cost.primitive_time_s(call.kind, call.size_bytes, call.axes)
            yield DividedCall(call, time_s * (1 - share), time_s * share)

    inside_s = 0.0
    for part, apart in ((times.forward, calls.forward), (times.of("backward"), calls.backward)):
        hidden_s = part.duration(times.overlap_slowdown_fraction).hidden_s
        yield from divided(apart.waited, n, 0.0)
        share = hidden_s / part.overlapped_s if part.overlapped_s else 0.0
        yield from divided(apart.overlapped, n, share)
        inside_s += n * hidden_s
    sync_hidden_s = max(timeline.devices[stage].hidden_s - inside_s, 0.0)
    yield from divided((*calls.before, *calls.step.waited), 1.0, 0.0)
    share = sync_hidden_s / times.sync_s if times.sync_s else 0.0
    yield from divided(calls.step.overlapped, 1.0, share)
