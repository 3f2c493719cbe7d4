"""What backward runs again: lines of recomputed segments, and gathers of parameters.

The lines of a segment (`stage_program.Segment`) run again before the backward of its last line.
What they gather is held until the segment's backward. Outside of segments, a gathered parameter
that an operator keeps is gathered again in the operator's backward. A gathered parameter that a
segment takes as input is gathered again before the segment runs again.
"""

from __future__ import annotations

from autopar.program.stage_program import (
    CallLine,
    FreeLine,
    GatherLine,
    StageProgram,
    storage_owners,
)


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


def regathered(program: StageProgram) -> dict[int, tuple[GatherLine, ...]]:
    """Position of an operator -> the gathers that its backward repeats."""
    if not any(isinstance(line, GatherLine) for line in program.body):
        return {}
    inside = {i for segment in program.segments for i in range(segment.start, segment.stop)}
    takes = {segment.start: segment for segment in program.segments}
    made: dict[str, GatherLine] = {}
    found: dict[int, tuple[GatherLine, ...]] = {}
    for i, (line, owner) in enumerate(zip(program.body, storage_owners(program.body), strict=True)):
        if i in takes:
            taken = [owner.get(name, name) for name in takes[i].inputs]
            found[takes[i].last] = tuple(made[k] for k in taken if k in made)
        if isinstance(line, GatherLine):
            made[owner[line.out.name]] = line
        elif isinstance(line, CallLine) and i not in inside:
            kept = [owner.get(name, name) for name in line.keeps]
            found[i] = tuple(made[k] for k in kept if k in made)
    again: set[str] = set()
    for i in sorted(found, reverse=True):  # the first operator in backward's order gathers it
        found[i] = tuple(line for line in found[i] if line.out.name not in again)
        again.update(line.out.name for line in found[i])
    return {i: lines for i, lines in found.items() if lines}
