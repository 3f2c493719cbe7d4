"""The loss's way to all ranks: begun in forward, waited for when the step ends.

Nothing of a training step needs the loss itself, so no rank waits there for a slower one:

    before    all_reduce of the loss, division, backward
    after     start, backward, ...          at the end of the step: wait, division

Only lines on single elements move, whose results neither backward nor the model's outputs read.
The call keeps its place in the order of calls, so all ranks still agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from autopar.caching import once
from autopar.placement import COLLECTIVES
from autopar.program.lines import CallLine, Line, MoveLine, StageProgram


@once
def lines_at_end(program: StageProgram) -> tuple[int, ...]:
    """The positions of the lines that make the loss, from its first collective on; none if forward
    makes it."""
    body = program.body
    if program.loss is None or not program.trains:
        return ()
    needed = {
        *program.held,
        *(n for line in body if isinstance(line, CallLine) for n in line.keeps),
    }
    needed |= {n for s in program.segments for i in s.again for n in body[i].reads}
    single = {name for name, of in program.variables.items() if math.prod(of.shape) == 1}
    for i, line in enumerate(body):
        if not isinstance(line, MoveLine) or line.move.forward not in COLLECTIVES:
            continue
        if math.prod(line.out.shape) != 1:
            continue
        later = _dependents(program, i)
        between = [x for k, x in enumerate(body) if k > i and k not in later]
        if any(_communicates(body[k]) for k in later[1:]) and any(map(_communicates, between)):
            continue  # calls would change places
        made = {name for k in later for name in body[k].writes}
        may_wait = all(_may_wait(body[k], single) for k in later)
        if program.loss in made and made.isdisjoint(needed) and may_wait:
            return later
    return ()


def _communicates(line: Line) -> bool:
    """Does it make calls in an order that ranks share? Gathers of parameters have none."""
    if isinstance(line, MoveLine):
        return line.move.forward in COLLECTIVES
    return isinstance(line, CallLine) and bool(line.inner)


def _dependents(program: StageProgram, first: int) -> tuple[int, ...]:
    """The positions of `first`, and of what reads a result of it, directly or not; in order."""
    made, found = {*program.body[first].writes}, [first]
    for k in range(first + 1, len(program.body)):
        line = program.body[k]
        if not made.isdisjoint(line.reads):
            made.update(line.writes)
            found.append(k)
    return tuple(found)


def _may_wait(line: Line, single: Collection[str]) -> bool:
    """Is it a move or an operator of torch's, without memory of its own, on single elements?"""
    if isinstance(line, CallLine):
        plain = line.target.startswith("aten.") and line.lowered is None and not line.saved_bytes
        return plain and all(name in single for name in line.reads)
    return isinstance(line, MoveLine) and line.source in single
