"""Which collectives a step waits for most, on the busiest device of a simulated step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.hardware import group_on
from autopar.cost.laws import CostModel
from autopar.cost.price.divided import divided_calls
from autopar.cost.simulate import Timeline
from autopar.placement import PrimitiveKind
from autopar.program.lines import Pipeline


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
    found: dict[tuple[PrimitiveKind, bool], float] = defaultdict(float)
    for divided in divided_calls(pipeline, costs, timeline, timeline.busiest_device):
        cost = costs[divided.stage]
        known = cost.mesh.nodes is not None
        crosses = known and group_on(cost.mesh, divided.call.axes).n_nodes > 1
        found[divided.call.kind, crosses] += divided.exposed_s
    rows = (ExposedCalls(*key, time_s) for key, time_s in found.items() if time_s > 0)
    return tuple(sorted(rows, key=lambda row: -row.time_s))
