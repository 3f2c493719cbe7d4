"""Where the variables of a lowered body end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.program import FreeLine, Line, StageProgram


def with_frees(program: StageProgram) -> StageProgram:
    """`program` with a `FreeLine` after the last use of every variable that the body defines.

    The inputs of a segment belong to its caller, so they are freed after the segment.
    """
    body, last = program.body, _last_uses(program)
    spans = {i: s for s in program.segments for i in range(s.start, s.stop)}
    out: list[Line] = []
    moved: dict[int, int] = {}
    stops: dict[int, int] = {}
    for i, line in enumerate(body):
        moved[i] = len(out)
        out.append(line)
        dead = dict.fromkeys(n for n in (*line.reads, *line.writes) if last.get(n) == i)
        segment = spans.get(i)
        if segment is None:
            out += _freed(dead)
            continue
        out += _freed(n for n in dead if n not in segment.inputs)
        if i == segment.stop - 1:
            stops[segment.start] = len(out)
            within = range(segment.start, segment.stop)
            out += _freed(n for n in segment.inputs if last.get(n, -1) in within)
    segments = tuple(
        replace(
            s,
            start=moved[s.start],
            stop=stops[s.start],
            last=moved[s.last],
            kept=frozenset(moved[i] for i in s.kept),
            handed_on=frozenset(moved[i] for i in s.handed_on),
        )
        for s in program.segments
    )
    return replace(program, body=tuple(out), segments=segments)


def _last_uses(program: StageProgram) -> dict[str, int]:
    """Variable that the body defines and does not return -> the line that uses it last."""
    last: dict[str, int] = {}
    defined: set[str] = set()
    for i, line in enumerate(program.body):
        defined.update(line.writes)
        for name in (*line.reads, *line.writes):
            last[name] = i
    defined -= program.returned
    return {name: i for name, i in last.items() if name in defined}


def _freed(names: Iterable[str]) -> list[Line]:
    found = tuple(names)
    return [FreeLine(found)] if found else []
