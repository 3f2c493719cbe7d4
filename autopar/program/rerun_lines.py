"""What backward runs again: lines of recomputed segments, and gathers of parameters.

The lines of a segment (`stage_program.Segment`) run again before the backward of its last line.
What they gather is held until the segment's backward. Outside of segments, a gathered parameter
that an operator keeps is gathered again before the operator's backward, together with its run. One
that a segment takes as input is gathered again before the segment runs again. The last run may stay
gathered (`kept_gathers`).
"""

from __future__ import annotations

from autopar.program.gathers import gathers_at, runs_of
from autopar.program.once import once
from autopar.program.stage_program import (
    CallLine,
    FreeLine,
    GatherLine,
    StageProgram,
    storage_owners,
)


@once
def rerun(program: StageProgram) -> dict[int, tuple[int, ...]]:
    """Position of a line -> positions of the lines that run again before its backward, in order."""
    return {
        segment.last: tuple(
            i
            for i in segment.rerun_range
            if i not in segment.kept | segment.handed_on
            and not isinstance(program.body[i], FreeLine)
        )
        for segment in program.segments
    }


@once
def regathered(program: StageProgram) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Position of an operator -> positions of the gathers that come before its backward, by run.

    What backward needs of a run is gathered together, where the first line needs one of it.
    """
    runs, needed = runs_of(program), _needed_again(program)
    kept = kept_gathers(program)
    stays = {k for k in runs if _name(program, k) in kept}
    every = {k for positions in needed.values() for k in positions}
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    there = set(stays)
    for i in sorted(needed, reverse=True):  # the first operator in backward's order gathers a run
        wanted = dict.fromkeys(runs[k] for k in needed[i] if k not in there)
        members = [tuple(k for k in run if k in every and k not in stays) for run in wanted]
        there.update(k for run in members for k in run)
        if members:
            found[i] = tuple(members)
    return found


@once
def kept_gathers(program: StageProgram) -> frozenset[str]:
    """The gathered variables that backward finds as forward left them: those of the last run.

    Backward would gather them first of all, so nothing is saved by dropping them. If there are
    several stages, each microbatch in flight would keep its own, so none does.
    """
    needed = {i: positions for i, positions in _needed_again(program).items() if positions}
    if not needed or program.received or program.sent:
        return frozenset()
    (*_, last), first = runs_of(program).values(), max(needed)
    inside = {k for segment in program.segments for k in range(segment.start, segment.stop)}
    if first in inside or not set(needed[first]).issubset(last):
        return frozenset()
    every = {k for positions in needed.values() for k in positions}
    return frozenset(_name(program, k) for k in last if k in every)


def _name(program: StageProgram, position: int) -> str:
    (line,) = gathers_at(program, [position])
    return line.out.name


@once
def _needed_again(program: StageProgram) -> dict[int, list[int]]:
    """Position of an operator -> positions of the gathers that its backward needs."""
    if not any(isinstance(line, GatherLine) for line in program.body):
        return {}
    inside = {i for segment in program.segments for i in range(segment.start, segment.stop)}
    outside = program.differentiated - inside
    takes = {segment.start: segment for segment in program.segments}
    made: dict[str, int] = {}
    needed: dict[int, list[int]] = {}
    for i, (line, owner) in enumerate(zip(program.body, storage_owners(program.body), strict=True)):
        if i in takes:
            taken = [owner.get(name, name) for name in takes[i].inputs]
            needed[takes[i].last] = [made[k] for k in taken if k in made]
        if isinstance(line, GatherLine):
            made[owner[line.out.name]] = i
        elif isinstance(line, CallLine) and i in outside:
            kept = [owner.get(name, name) for name in line.keeps]
            needed[i] = [made[k] for k in kept if k in made]
    return needed
