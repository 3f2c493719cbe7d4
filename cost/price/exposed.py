"""Which collectives a step waits for most, on the busiest device of a simulated step.

    exposed_s of a call = its time, if compute waits for it; else its time x the share of its part
                          of the step that is not hidden

Where only some of the overlapped collectives of a part are hidden, each is hidden to one share.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.hardware import group_on
from autopar.cost.laws import CostModel
from autopar.cost.price.overlap import Calls, overlap_of
from autopar.cost.simulate import Timeline
from autopar.placement import PrimitiveKind
from autopar.program import Pipeline


@dataclass(frozen=True)
class ExposedCalls:
    """The calls of a collective over groups of one kind: seconds of a step that wait for them."""

    kind: PrimitiveKind
    crosses_nodes: bool
    time_s: float


def exposed_calls(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline
) -> tuple[ExposedCalls, ...]:
    """By kind and links, the most seconds first; `timeline` is that of the pipeline."""
    stage = max(range(len(timeline.devices)), key=lambda k: timeline.devices[k].busy_s)
    cost, m = costs[stage], pipeline.n_microbatches
    times, calls = timeline.record.stages[stage], overlap_of(pipeline.stages[stage])
    found: dict[tuple[PrimitiveKind, bool], float] = defaultdict(float)

    def add(of: Calls, factor: float) -> None:
        for call in of:
            known = cost.mesh.nodes is not None
            crosses = known and group_on(cost.mesh, call.axes).n_nodes > 1
            time_s = cost.primitive_time_s(call.kind, call.size_bytes, call.axes)
            found[call.kind, crosses] += factor * time_s

    inside_s = 0.0
    for part, apart in ((times.forward, calls.forward), (times.of("backward"), calls.backward)):
        hidden_s = part.duration(times.overlap_slowdown_fraction).hidden_s
        exposed = 1 - hidden_s / part.overlapped_s if part.overlapped_s else 0.0
        add(apart.waited, m)
        add(apart.overlapped, m * exposed)
        inside_s += m * hidden_s
    sync_hidden_s = max(timeline.devices[stage].hidden_s - inside_s, 0.0)
    add((*calls.before, *calls.step.waited), 1.0)
    add(calls.step.overlapped, 1 - sync_hidden_s / times.sync_s if times.sync_s else 0.0)
    rows = (ExposedCalls(*key, time_s) for key, time_s in found.items() if time_s > 0)
    return tuple(sorted(rows, key=lambda row: -row.time_s))
