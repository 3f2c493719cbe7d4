"""The loss's way to all ranks: begun in forward, waited for when the step ends.

Nothing of a training step needs the loss itself, so no rank waits there for a slower one:

    before    all_reduce of the loss, division, backward
    after     start, backward, ...          at the end of the step: wait, division

Only lines on single elements move, whose results neither backward nor the model's outputs read.
The call keeps its place in the order of calls, so all ranks still agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from autopar.placement import COLLECTIVES
from autopar.program import (
    CallLine,
    FunctionLine,
    JointLine,
    KernelLine,
    Local,
    LossAtEnd,
    MoveLine,
    StageProgram,
    StartLine,
    Variable,
    WaitLine,
)


def with_loss_at_end(
    stage: StageProgram, lines: Sequence[JointLine], kept: Collection[str]
) -> list[JointLine]:
    """The lines of forward; those from the loss's first collective on come after a `LossAtEnd`.

    `kept` are the variables that others read: the results, but for the loss, and what is saved.
    """
    if stage.loss is None or stage.loss in kept:
        return list(lines)
    single = _single_elements(stage, lines)
    for i, line in enumerate(lines):
        if not isinstance(line, MoveLine) or line.move.forward not in COLLECTIVES:
            continue
        if line.phase == "param_gather" or math.prod(line.out.shape) != 1:
            continue
        later = _dependents(lines, i)
        between = [x for k, x in enumerate(lines) if k > i and k not in later]
        if any(_communicates(lines[k]) for k in later[1:]) and any(map(_communicates, between)):
            continue  # calls would change places
        if any(stage.loss in lines[k].writes for k in later) and all(
            _may_wait(lines[k], single) and set(lines[k].writes).isdisjoint(kept) for k in later
        ):
            begun = StartLine(line, f"{line.out.name}_coming")
            rest = [WaitLine(line, begun.pending), *(lines[k] for k in later[1:])]
            return [*lines[:i], begun, *between, LossAtEnd(), *rest]
    return list(lines)


def _communicates(line: JointLine) -> bool:
    """Does it make calls in an order that ranks share? Gathers of parameters have none."""
    match line:
        case MoveLine():
            return line.move.forward in COLLECTIVES
        case CallLine():
            return bool(line.inner)
        case FunctionLine():
            return bool(line.call.inner)
        case _:
            return False


def _single_elements(stage: StageProgram, lines: Sequence[JointLine]) -> frozenset[str]:
    """The variables of forward that have one element."""
    known: list[Local | Variable] = [d.local for d in stage.delivered]
    known += [out for line in stage.body for out in line.outs]
    known += [out for line in lines if isinstance(line, KernelLine) for out in line.outs]
    return frozenset(x.name for x in known if math.prod(x.shape) == 1)


def _dependents(lines: Sequence[JointLine], first: int) -> list[int]:
    """The positions of `first`, and of what reads a result of it, directly or not; in order."""
    made, found = set(lines[first].writes), [first]
    for k in range(first + 1, len(lines)):
        if not made.isdisjoint(lines[k].reads):
            made.update(lines[k].writes)
            found.append(k)
    return found


def _may_wait(line: JointLine, single: Collection[str]) -> bool:
    match line:
        case MoveLine():
            return line.source in single
        case CallLine(lowered=None) | KernelLine():
            return all(name in single for name in line.reads)
        case _:
            return False
