"""How long the parts of a step take on one stage, from its lines and its collectives.

    before    parameters converted for use                                once
    forward   the lines of the body                                       per microbatch
    backward  the differentiated lines, the recomputed lines, and the
              return of ZeRO-2 gradients, perhaps in two parts            per microbatch
    sync      the return of the other gradients, beside the last backward once
    after     what of that return cannot start there; then the optimizer  once

Each part has compute (operators, and the local parts of reshards) and collectives. Which of them
run beside compute, `overlap.py` says; all others wait. `CallLine.forward_s` is compute alone; the
collectives inside a lowered operator are priced with all others, from `step_calls`.
`MoveLine.forward_s` of a collective is left out of compute. The two gradients of a matmul have the
same FLOPs, so each takes half of its backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from autopar.cost.laws import CostModel
from autopar.cost.memory import update_time_s
from autopar.cost.price.documents import document_lines, document_loads
from autopar.cost.price.overlap import Calls, overlap_of, overlapped_of, slowdown_of, waited_of
from autopar.cost.simulate import PartWork, SplitBackward, StageTimes
from autopar.placement import COLLECTIVES
from autopar.program.communication import (
    Backward,
    Forward,
    Reduction,
    Start,
    Wait,
    Work,
    backward_order,
    backward_parts,
    forward_order,
    positions_of,
)
from autopar.program.lines import (
    CallLine,
    GatherLine,
    Line,
    MoveLine,
    StageProgram,
    counted_sum,
    every_parameter,
    line_counts,
)


def stage_times(program: StageProgram, cost: CostModel, optimizer: str) -> StageTimes:
    """The times of one stage; all its ranks take the same time."""
    calls = overlap_of(program, cost)
    converted_s, returned_s = _conversions_s(program)
    loads = document_loads(program, cost)
    loaded = document_lines(program) if loads else ()

    def work(lines: Iterable[LineTime], calls: Calls, more_s: float = 0.0) -> PartWork:
        lines = list(lines)
        loaded_s = _total_s(line for line in lines if line.position in loaded)
        whole_s, beside_s = _total_s(lines) + more_s, overlapped_of(calls)
        return PartWork(whole_s, waited_of(calls), beside_s, loaded_s=loaded_s)

    first, second = (list(line_times(program, part)) for part in backward_parts(program))
    backward: PartWork | SplitBackward = work(first, calls.backward, returned_s["micro"])
    if program.splits_backward:
        weights = work(second, calls.weights, returned_s["micro"])
        backward = SplitBackward(work(first, calls.backward), weights)
    sync_s, last_s = overlapped_of(calls.step), calls.last_s
    return StageTimes(
        n_ranks=cost.mesh.n_ranks,
        before=PartWork(converted_s, waited_of(calls.before)),
        forward=work(forward_lines(program), calls.forward),
        backward=backward,
        after=PartWork(returned_s["step"], waited_of(calls.step)),
        update_s=_update_s(program, cost, optimizer) if program.trains else 0.0,
        sync_s=sync_s,
        n_sync_buckets=sync_s / last_s if last_s else 1.0,
        overlap_slowdown_fraction=slowdown_of(cost),
        loads=loads,
    )


class LineTime(NamedTuple):
    """Seconds of compute of the line at `position`, `n` times in one microbatch.

    `again`: it runs again for backward.
    """

    position: int
    time_s: float
    n: int
    again: bool = False


def forward_lines(program: StageProgram) -> Iterator[LineTime]:
    """Compute of one microbatch's forward: operators and local parts of reshards, in order."""
    return line_times(program, forward_order(program))


def backward_lines(program: StageProgram) -> Iterator[LineTime]:
    """Compute of its backward, in order: with what runs again, and local parts of gathers."""
    return line_times(program, backward_order(program))


def line_times(program: StageProgram, order: Sequence[Work]) -> Iterator[LineTime]:
    """Compute of works of forward or backward, in order."""
    counts = line_counts(program)
    for work in order:
        yield from _work_times(program, work, counts)


def _work_times(program: StageProgram, work: Work, counts: Sequence[int]) -> Iterator[LineTime]:
    done = work.call if isinstance(work, Wait) else work
    part = done.part if isinstance(done, Backward) else "whole"
    if isinstance(work, Start) or (part == "weight" and not program.splits_backward):
        return  # a matmul's two gradients are counted at the first if nothing is between the two
    share = 0.5 if part != "whole" and program.splits_backward else 1.0
    is_backward = isinstance(done, Backward | Reduction)
    again = isinstance(done, Forward) and done.again
    for i in positions_of(done):
        time_s = share * _line_s(program.body[i], is_backward, again)
        yield LineTime(i, time_s, counts[i], again)


def works_begin_s(program: StageProgram, is_backward: bool) -> list[float]:
    """Seconds of compute before each work of forward or backward; the last is that of all."""
    order = backward_order(program) if is_backward else forward_order(program)
    counts = line_counts(program)
    each_s = (_total_s(_work_times(program, work, counts)) for work in order)
    return list(accumulate(each_s, initial=0.0))


def _total_s(lines: Iterable[LineTime]) -> float:
    return counted_sum((line.time_s, line.n) for line in lines)


def _line_s(line: Line, is_backward: bool, again: bool) -> float:
    local_s = _local_backward_s if is_backward else _local_s
    match line:
        case CallLine():
            if again:
                return line.again_s
            return line.backward_s if is_backward else line.forward_s
        case MoveLine():
            return local_s(line)
        case GatherLine():
            return math.fsum(map(local_s, line.moves))
        case _:
            return 0.0


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
        update_time_s(n_elements, optimizer, dtype, device, cost.runs)
        for dtype, n_elements in stored.items()
    )
