"""Where values of a lowered body end: frees, and gathers that backward repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.stage_program import (
    CallLine,
    FreeLine,
    GatherLine,
    Line,
    reads,
    storage_owners,
    writes,
)  # fmt: skip


def with_regathers(body: Sequence[Line]) -> list[Line]:
    """Count, for every gathered parameter, how often autograd keeps it or a view of it."""
    counts: dict[str, int] = {}
    made: dict[int, str] = {}
    for i, (line, owner) in enumerate(zip(body, storage_owners(body), strict=True)):
        if isinstance(line, GatherLine):
            made[i] = owner[line.out.name]
        elif isinstance(line, CallLine):
            for name in line.keeps:
                kept = owner.get(name, name)
                counts[kept] = counts.get(kept, 0) + 1
    return [
        replace(line, regathers=counts.get(made[i], 0)) if isinstance(line, GatherLine) else line
        for i, line in enumerate(body)
    ]


def with_frees(body: Sequence[Line], kept: set[str | None]) -> list[Line]:
    """Insert a `FreeLine` after the last use of every variable the body defines."""
    last: dict[str, int] = {}
    defined: set[str] = set()
    for i, line in enumerate(body):
        defined.update(writes(line))
        for name in (*reads(line), *writes(line)):
            last[name] = i
    mortal = defined - kept
    out: list[Line] = []
    for i, line in enumerate(body):
        out.append(line)
        dead = dict.fromkeys(
            n for n in (*reads(line), *writes(line)) if last[n] == i and n in mortal
        )
        if dead:
            out.append(FreeLine(tuple(dead)))
    return out
