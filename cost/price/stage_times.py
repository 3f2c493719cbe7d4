"""How long the parts of a step take on one stage, from its lines and its collectives.

    before    parameters converted for use                                once
    forward   the lines of the body                                       per microbatch
    backward  the differentiated lines, the recomputed lines, and the
              return of ZeRO-2 gradients                                  per microbatch
    sync      the return of the other gradients, beside the last backward once
    after     what of that return cannot start there; then the optimizer  once

Each part has compute (operators, and the local parts of reshards) and collectives. Which of them
run beside compute, `overlap.py` says; all others wait. `CallLine.forward_s` is compute alone; the
collectives inside a lowered operator are priced with all others, from `step_calls`.
`MoveLine.forward_s` of a collective is left out of compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from autopar.cost.laws import CostModel
from autopar.cost.memory import optimizer_time_s
from autopar.cost.price.overlap import Apart, calls_time_s, overlap_of, slowdown_of
from autopar.cost.simulate import PartWork, StageTimes
from autopar.placement import COLLECTIVES
from autopar.program import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    StageProgram,
    counted_sum,
    every_parameter,
    line_counts,
    regathered,
    rerun,
)


def stage_times(program: StageProgram, cost: CostModel, optimizer: str) -> StageTimes:
    """The times of one stage; all its ranks take the same time."""
    calls = overlap_of(program)
    converted_s, returned_s = _conversions_s(program)
    backward_s = _total_s(backward_lines(program)) + returned_s["micro"]
    sync_s, last_s = calls_time_s(calls.step.overlapped, cost), calls_time_s(calls.last, cost)
    return StageTimes(
        n_ranks=cost.mesh.n_ranks,
        before=PartWork(converted_s, calls_time_s(calls.before, cost)),
        forward=_work(_total_s(forward_lines(program)), calls.forward, cost),
        backward=_work(backward_s, calls.backward, cost),
        after=PartWork(returned_s["step"], calls_time_s(calls.step.waited, cost)),
        update_s=_update_s(program, cost, optimizer) if program.trains else 0.0,
        sync_s=sync_s,
        n_sync_buckets=sync_s / last_s if last_s else 1.0,
        overlap_slowdown_fraction=slowdown_of(cost),
    )


def _work(compute_s: float, calls: Apart, cost: CostModel) -> PartWork:
    waited_s, overlapped_s = (calls_time_s(of, cost) for of in calls)
    return PartWork(compute_s, waited_s, overlapped_s)


class LineTime(NamedTuple):
    """Seconds of compute of the line at `position`, `n` times in one microbatch."""

    position: int
    time_s: float
    n: int


def forward_lines(program: StageProgram) -> Iterator[LineTime]:
    """Compute of one microbatch's forward: operators and local parts of reshards, in order."""
    counts = line_counts(program)
    for i, line in enumerate(program.body):
        yield from (LineTime(i, time_s, counts[i]) for time_s in _line_s(line))


def backward_lines(program: StageProgram) -> Iterator[LineTime]:
    """Compute of its backward, last line first; recomputed lines and local parts of regathers come
    before the line that needs them."""
    anew, again, counts = regathered(program), rerun(program), line_counts(program)
    for i in sorted(program.differentiated, reverse=True):
        line, times = program.body[i], list[LineTime]()
        gathers = (gather for run in anew.get(i, ()) for gather in run)
        times += [
            LineTime(i, _local_s(move), counts[i]) for gather in gathers for move in gather.moves
        ]
        times += [
            LineTime(k, time_s, counts[i])
            for k in again.get(i, ())
            for time_s in _line_s(program.body[k])
        ]
        if isinstance(line, CallLine):
            times.append(LineTime(i, line.backward_s, counts[i]))
        elif isinstance(line, MoveLine):
            times.append(LineTime(i, _local_backward_s(line), counts[i]))
        elif isinstance(line, GatherLine):
            times += [LineTime(i, _local_backward_s(move), counts[i]) for move in line.moves]
        yield from times


def _total_s(lines: Iterable[LineTime]) -> float:
    return counted_sum((line.time_s, line.n) for line in lines)


def _line_s(line: Line) -> list[float]:
    if isinstance(line, CallLine):
        return [line.forward_s]
    if isinstance(line, MoveLine):
        return [_local_s(line)]
    return [_local_s(move) for move in line.moves] if isinstance(line, GatherLine) else []


def _local_s(line: MoveLine) -> float:
    """Forward of a move that communicates nothing; 0.0 for a collective."""
    return 0.0 if line.move.forward in COLLECTIVES else line.forward_s


def _local_backward_s(line: MoveLine) -> float:
    return 0.0 if line.move.backward in COLLECTIVES else line.backward_s


def _conversions_s(program: StageProgram) -> tuple[float, dict[str, float]]:
    """Casts and local parts of converting parameters for use, and of returning gradients, by
    period."""
    converted: list[float] = []
    returned: dict[str, list[float]] = {"micro": [], "step": []}
    for parameter in every_parameter(program):
        converted.append(parameter.cast_s)
        for use in parameter.uses:
            converted += [_local_s(move) for move in use.moves]
            period = "micro" if parameter.period == "micro" else "step"
            returned[period] += [_local_backward_s(move) for move in use.moves]
    return math.fsum(converted), {period: math.fsum(times) for period, times in returned.items()}


def _update_s(program: StageProgram, cost: CostModel, optimizer: str) -> float:
    """The optimizer's update of the stored shards; one launch per operator covers a whole dtype."""
    stored: dict[torch.dtype, int] = {}
    for parameter in every_parameter(program):
        if parameter.requires_grad:
            dtype = parameter.stored.dtype
            stored[dtype] = stored.get(dtype, 0) + math.prod(parameter.stored.shape)
    device = cost.mesh.device
    return math.fsum(
        optimizer_time_s(n_elements, optimizer, dtype, device)
        for dtype, n_elements in stored.items()
    )
