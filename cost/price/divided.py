"""Every collective of a simulated step, divided: the seconds that wait for it, and those beside it.

    exposed_s of a call = its time, if compute waits for it; else its time x the share of its part
                          of the step that is not hidden

Where only some of the overlapped collectives of a part are hidden, each is hidden to one share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, Overlap, overlap_of, overlapped_of
from autopar.cost.simulate import PartWork, StageTimes, Timeline
from autopar.program.communication import RankCall
from autopar.program.lines import Pipeline


@dataclass(frozen=True)
class DividedCall:
    """Seconds of a step of one call: those that compute waits for, and those beside it."""

    stage: int
    call: RankCall
    exposed_s: float
    hidden_s: float


def divided_calls(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline, device: int
) -> Iterator[DividedCall]:
    """Every call of a step of a device, its stages and microbatches together.

    What is hidden of gradient sync is hidden to one share of all stages.
    """
    stages = timeline.stages_on(device)
    calls = {k: overlap_of(pipeline.stages[k], costs[k]) for k in stages}
    n, inside_s = pipeline.n_microbatches, 0.0
    for k in stages:
        for part, own in _parts(timeline.record.stages[k], calls[k]):
            times = timeline.record.stages[k]
            slowdown, loads = times.overlap_slowdown_fraction, times.loads or (1.0,)
            each_s = [part.duration(slowdown, load=load).hidden_s for load in loads]
            hidden_s = math.fsum(each_s) / len(each_s)
            yield from _divided(k, own, n, hidden_s, overlapped_of(own))
            inside_s += n * hidden_s
        yield from _divided(k, calls[k].before, 1.0, 0.0, 0.0)
    sync_hidden_s = max(timeline.devices[device].hidden_s - inside_s, 0.0)
    sync_s = sum(overlapped_of(calls[k].step) for k in stages)
    for k in stages:
        yield from _divided(k, calls[k].step, 1.0, sync_hidden_s, sync_s)


def _parts(times: StageTimes, calls: Overlap) -> Iterator[tuple[PartWork, Calls]]:
    """The parts of a microbatch that are simulated, with their calls."""
    yield times.forward, calls.forward
    if isinstance(times.backward, PartWork):
        yield times.backward, calls.backward + calls.weights
    else:
        yield times.backward.input, calls.backward
        yield times.backward.weight, calls.weights


def _divided(
    stage: int, calls: Calls, factor: float, hidden_s: float, overlapped_s: float
) -> Iterator[DividedCall]:
    """Calls of which `hidden_s` of `overlapped_s` seconds beside compute are hidden."""
    share = hidden_s / overlapped_s if overlapped_s else 0.0
    for call, time_s in sorted(calls, key=lambda timed: timed.call.is_beside):
        of_call = share if call.is_beside else 0.0
        yield DividedCall(stage, call, factor * time_s * (1 - of_call), factor * time_s * of_call)
