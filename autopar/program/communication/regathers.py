"""Which parameters backward gathers again, and before which operator.

Outside of segments, a gathered parameter that an operator keeps is gathered again before the
operator's backward, together with its run. One that a segment reads and does not gather itself is
gathered again before the segment runs again. The last run may stay gathered (`kept_gathers`).
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.caching import once
from autopar.program.communication.backwards import is_late
from autopar.program.communication.gathers import gathers_at, runs_of
from autopar.program.lines import CallLine, GatherLine, Segment, StageProgram, storage_owners


@once
def repeated_gathers(program: StageProgram) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Position of an operator -> positions of the gathers that come before its backward, by run.

    What backward needs of a run is gathered together, where the first line needs one of it.
    """
    runs, needed = runs_of(program), _needed_again(program)
    kept = kept_gathers(program)
    stays = {k for k, name in zip(runs, _names(program, runs), strict=True) if name in kept}
    every = {k for positions in needed.values() for k in positions}
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    there = set(stays)
    # The first operator in backward's order gathers a run.
    for i in sorted(needed, key=lambda i: (is_late(program, i), -i)):
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
    return frozenset(_names(program, [k for k in last if k in every]))


@once
def _needed_again(program: StageProgram) -> dict[int, list[int]]:
    """Position of an operator -> positions of the gathers that its backward needs.

    The last operator of a segment needs, of those before it, what the whole segment needs.
    """
    gathers = [i for i, line in enumerate(program.body) if isinstance(line, GatherLine)]
    if not gathers:
        return {}
    segments = {i: s for s in program.segments for i in range(s.start, s.stop)}
    made = {name: i for i, name in zip(gathers, _names(program, gathers), strict=True)}
    needed: dict[int, list[int]] = {}
    for i, (line, owner) in enumerate(zip(program.body, storage_owners(program.body), strict=True)):
        segment, read = segments.get(i), tuple[str, ...]()
        if segment is not None and i in segment.again:
            read = line.reads
        if isinstance(line, CallLine) and i in program.differentiated:
            read += line.keeps
        first, last = (i, i) if segment is None else (segment.start, _last_of(program, segment))
        owners = dict.fromkeys(owner.get(name, name).rpartition("@")[0] for name in read)
        positions = [made[name] for name in owners if name in made]
        needed.setdefault(last, []).extend(k for k in positions if k < first)
    return needed


def _last_of(program: StageProgram, segment: Segment) -> int:
    """The line of a segment whose backward comes first."""
    lines = (i for i in range(segment.last, segment.start - 1, -1) if not is_late(program, i))
    return next(lines, segment.last)


def _names(program: StageProgram, positions: Iterable[int]) -> list[str]:
    """The variables of the gathers at some positions."""
    return [line.out.name for line in gathers_at(program, positions)]
