"""ZeRO-3 beside compute: parameters are gathered one run ahead, gradients reduced one run behind.

A run is a block's parameters (`autopar/program/gathers.py`). Its communication takes as long as its
neighbour's compute:

    gathers       run 2 begins when run 1 is there, in forward and again in backward; run 1 begins
                  with the function
    reductions    run 2 is waited for when run 1's begin, or at the end

So at most two runs are whole at once. Packing and order are fixed, so all bits are those of a
program that waits at once. A parameter that needs several moves is not begun early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.placement import COLLECTIVES
from autopar.program import (
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    StageProgram,
    StartLine,
    WaitLine,
    fused_gathers,
    gathers_at,
    runs_of,
)

# Gathered variable -> the gathers of its run.
Runs = Mapping[str, tuple[GatherLine, ...]]


def runs_by_name(stage: StageProgram) -> Runs:
    """The run of every gathered variable."""
    found: dict[str, tuple[GatherLine, ...]] = {}
    for run in dict.fromkeys(runs_of(stage).values()):
        lines = tuple(gathers_at(stage, run))
        found |= {line.out.name: lines for line in lines}
    return found


def with_gathers_ahead(lines: Sequence[JointLine], runs: Runs) -> list[JointLine]:
    """The lines, with the gathers of each run fused, and begun when those before it are there."""
    found: list[JointLine] = []
    at = 0  # where the run before has arrived
    for group in _grouped(lines, lambda line: _run(line, runs)):
        if not isinstance(group[0], GatherLine):
            found += group
            continue
        gathers = [line for line in group if isinstance(line, GatherLine)]
        calls: list[GatherLine | FusedGathers] = [
            fused[0] if len(fused) == 1 else FusedGathers(fused) for fused in fused_gathers(gathers)
        ]
        if at == len(found):
            found += calls
        else:
            early = [call for call in calls if _is_one_call(call)]
            found[at:at] = [StartLine(call, _handle(call)) for call in early]
            found += [WaitLine(call, _handle(call)) if call in early else call for call in calls]
        at = len(found)
    return found


def with_reductions_behind(lines: Sequence[JointLine]) -> list[JointLine]:
    """The lines of backward; reductions of a run's gradients are waited for at the next run's."""
    found: list[JointLine] = []
    under_way: list[WaitLine] = []

    def wait() -> None:
        found.extend(under_way)
        under_way.clear()

    before = False
    for line in lines:
        is_reduction = _is_reduction(line)
        made = {name for waiting in under_way for name in waiting.writes}
        if (is_reduction and not before) or not made.isdisjoint(line.reads):
            wait()
        before = is_reduction
        if isinstance(line, GradientMove | FusedReductions) and is_reduction and _is_one_call(line):
            found.append(StartLine(line, _handle(line)))
            under_way.append(WaitLine(line, _handle(line)))
        else:
            found.append(line)
    wait()
    return found


def _grouped(
    lines: Sequence[JointLine], key: Callable[[JointLine], object]
) -> list[list[JointLine]]:
    """Neighbours of equal key, together."""
    found: list[list[JointLine]] = []
    before: object = None
    for line in lines:
        own = key(line)
        if found and own == before:
            found[-1].append(line)
        else:
            found.append([line])
        before = own
    return found


def _run(line: JointLine, runs: Runs) -> int | None:
    return id(runs[line.out.name]) if isinstance(line, GatherLine) else None


def _is_reduction(line: JointLine) -> bool:
    is_move = isinstance(line, GradientMove) and line.phase == "grad_sync"
    return is_move or isinstance(line, FusedReductions)


def _is_one_call(line: GatherLine | FusedGathers | GradientMove | FusedReductions) -> bool:
    match line:
        case GatherLine():
            return len(line.moves) == 1 and line.moves[0].move.forward in COLLECTIVES
        case GradientMove():
            return line.move.move.backward in COLLECTIVES
        case _:
            return True


def _handle(line: JointLine) -> str:
    return f"{line.writes[0]}_coming"
