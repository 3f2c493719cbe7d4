"""Verifies that a joint program communicates what is priced (`check_calls`).

`step_calls` lists the calls of a step, from the lines of the stage. The lines of forward and of
backward must make the same.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autopar.placement import COLLECTIVES
from autopar.program import (
    CallLine, FunctionBackward, FunctionLine, GatherLine, GradientMove, JointLine, JointProgram,
    MoveLine, StartLine,  step_calls, return_buckets
)
Call = tuple[str, tuple[int, ...], int]

def calls_of(line, dtypes):
    match line:
        case MoveLine():
            yield from _moved(line)
        case GatherLine():
            for move in line.moves: yield from _moved(move)
        case CallLine():
            yield from _inner(line, "forward")
        case FunctionLine():
            yield from _inner(line.call, "forward")
        case FunctionBackward():
            yield from _inner(line.call, "backward")
        case GradientMove():
            if line.move.move.backward in COLLECTIVES:
                yield line.move.move.backward, line.move.move.axes, line.move.backward_bytes
        case StartLine():
            yield from calls_of(line.move, dtypes)

def _moved(line):
    if line.move.forward in COLLECTIVES:
        yield line.move.forward, line.move.axes, line.forward_bytes
def _inner(line, phase):
    return ((c.kind, line.lowered_axes, c.size_bytes) for c in line.inner if c.phase == phase)

def stats(joint):
    c = step_calls(joint.stage)
    n = len(return_buckets(joint.stage, "micro")[1])
    bw = c.backward[:len(c.backward)-n]
    out = {}
    if not joint.stage.trains: bw=()
    for what, lines, priced in (("fw", joint.forward, c.forward), ("bw", joint.backward, bw)):
        mine = [x for l in lines for x in calls_of(l, None)]
        want = [(x.kind, x.axes, x.size_bytes) for x in priced]
        out[what] = (mine == want, Counter(mine) == Counter(want))
        if mine != want:
            out[what+"x"] = (mine, [(x.kind, x.axes, x.size_bytes, x.phase, x.tensor) for x in priced])
    return out
