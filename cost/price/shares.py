"""What a step is made of, on its busiest device: seconds by kind, which add up to the step.

    matmul, attention, pointwise    kernels of the lines, forward, backward and recomputed
    conversion                      parameters made for use, and gradients brought back, on a rank
    slowdown                        what compute takes longer beside communication
    collective                      exposed ones, by the axes that they go over
    other collective                of tied gradients and of the loss
    wait, idle, optimizer           for messages under way; the bubble; the update
    slowest rank                    what it takes longer than the mean (`Software.slowest_of`)

    step = sum of all            (the accounting of `cost/simulate/simulation.py`)

Where only a part of some collectives is hidden, each of them is hidden to the same share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price.divided import divided_calls
from autopar.cost.price.documents import document_lines
from autopar.cost.price.stage_times import backward_lines, forward_lines
from autopar.cost.simulate import Timeline
from autopar.program.lines import CallLine, Line, Pipeline

_KINDS = ("matmul", "attention", "pointwise")


@dataclass(frozen=True)
class Share:
    """Seconds of a step; `axes` are those of a collective, as `dp+tp`."""

    kind: str
    time_s: float
    axes: str = ""


@dataclass(frozen=True)
class StepShares:
    """The step of the busiest device: `parts` add up to it, `hidden` runs beside them."""

    device: int
    step_time_s: float
    parts: tuple[Share, ...]
    hidden: tuple[Share, ...]


def step_shares(pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline) -> StepShares:
    """The shares of a step; `timeline` is that of the pipeline."""
    device, totals = timeline.busiest_device, timeline.busiest
    n, converted_s = pipeline.n_microbatches, 0.0
    by_kind: dict[str, float] = defaultdict(float)
    for stage in timeline.stages_on(device):
        program, times = pipeline.stages[stage], timeline.record.stages[stage]
        backward = list(backward_lines(program))
        loaded = document_lines(program)
        for line in (*forward_lines(program), *backward):
            load = times.mean_load if line.position in loaded else 1.0
            by_kind[_kind(program.body[line.position])] += n * load * line.n * line.time_s
        returned_s = times.of("backward").compute_s - math.fsum(x.n * x.time_s for x in backward)
        converted_s += times.before.compute_s + times.after.compute_s + n * returned_s
    slowdown_s = totals.compute_s - math.fsum(by_kind.values()) - converted_s
    exposed, hidden = _by_axes(pipeline, costs, timeline, device)
    other_s = totals.collectives_s - math.fsum(exposed.values())
    jitter_s = timeline.step_time_s * (costs[0].runs.slowest_of(pipeline.n_ranks) - 1)
    parts = [
        *(Share(kind, by_kind[kind]) for kind in _KINDS),
        Share("conversion", converted_s),
        Share("slowdown", slowdown_s),
        *(Share("collective", time_s, axes) for axes, time_s in exposed.items()),
        Share("other collective", other_s),
        Share("wait", totals.waited_s),
        Share("idle", timeline.idle_s(device)),
        Share("optimizer", totals.update_s),
        Share("slowest rank", jitter_s),
    ]
    least_s = 1e-9 * timeline.step_time_s  # what is left of rounding
    return StepShares(
        device,
        timeline.step_time_s + jitter_s,
        tuple(part for part in parts if part.time_s > least_s),
        tuple(Share("collective", s, axes) for axes, s in hidden.items() if s > least_s),
    )


def _kind(line: Line) -> str:
    if not isinstance(line, CallLine) or not line.flops:
        return "pointwise"
    return "attention" if line.is_attention else "matmul"


def _by_axes(
    pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline, device: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Axes -> seconds of a step of their collectives, exposed and hidden."""
    exposed: dict[str, float] = defaultdict(float)
    hidden: dict[str, float] = defaultdict(float)
    for divided in divided_calls(pipeline, costs, timeline, device):
        names = pipeline.stages[divided.stage].axis_names
        axes = "+".join(names[axis] for axis in divided.call.axes)
        exposed[axes] += divided.exposed_s
        hidden[axes] += divided.hidden_s
    return exposed, hidden
