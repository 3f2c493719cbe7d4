"""Which collectives a step waits for most, on the busiest device of a simulated step.

    exposed_s of a call = its time, if compute waits for it; else its time x the share of its part
                          of the step that is not hidden

Where only some of the overlapped collectives of a part are hidden, each is hidden to one share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.hardware import group_on
from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, overlap_of
from autopar.cost.simulate import Timeline
from autopar.placement import PrimitiveKind
from autopar.program import Pipeline, RankCall, StageProgram


@dataclass(frozen=True)
class ExposedCalls:
    """The calls of a collective over groups of one kind: seconds of a step that wait for them."""

    kind: PrimitiveKind
    crosses_nodes: bool
    time_s: float


@dataclass(frozen=True)
class DividedCall:
    """Seconds of a step of one call: those that compute waits for, and those beside it."""

    call: RankCall
    exposed_s: float
    hidden_s: float


def exposed_calls(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline
) -> tuple[ExposedCalls, ...]:
    """By kind and links, the most seconds first; `timeline` is that of the pipeline."""
    stage = timeline.busiest_device
    cost = costs[stage]
    found: dict[tuple[PrimitiveKind, bool], float] = defaultdict(float)
    for divided in divided_calls(pipeline.stages[stage], cost, timeline, stage):
        known = cost.mesh.nodes is not None
        crosses = known and group_on(cost.mesh, divided.call.axes).n_nodes > 1
        found[divided.call.kind, crosses] += divided.exposed_s
    rows = (ExposedCalls(*key, time_s) for key, time_s in found.items() if time_s > 0)
    return tuple(sorted(rows, key=lambda row: -row.time_s))


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
