"""Verifies that both functions of a joint program communicate what is priced (`check_calls`).

`step_calls` lists the calls of a microbatch, off the stage's order of work; those of the joint
program must be the same: kind, group, bytes and order. A call that is begun counts where it begins.
A reduction's bytes follow from the shape and dtype of the gradient that it reduces.

ZeRO-2's fused reductions after backward are the runtime's (`runtime/execute/returns.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.placement import COLLECTIVES
from autopar.program import (
    CallLine,
    FunctionBackward,
    FunctionLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    MoveLine,
    RankCall,
    StartLine,
    WeightGradients,
    communications,
    kept_gathers,
    return_buckets,
    step_calls,
)
from autopar.verifier.joint_flow import error, place

# Kind, axes and bytes.
Call = tuple[str, tuple[int, ...], int]


def check_calls(joint: JointProgram) -> None:
    """Raise `VerificationError` unless the lines make the calls that are priced."""
    stage = joint.stage
    priced = step_calls(stage)
    n_fused = len(return_buckets(stage, "micro")[1])
    backward = priced.backward[: len(priced.backward) - n_fused] if stage.trains else ()
    saved, kept = frozenset(joint.saved), kept_gathers(stage)
    for number, line in enumerate(joint.forward):
        for gather in communications(line):
            if gather.out.name in saved and gather.out.name not in kept:
                raise error(f"{gather.out.name} is saved", place("forward", number, line))
    _compare("forward", joint.forward, priced.forward)
    _compare("backward", joint.backward, backward)


def line_calls(line: JointLine) -> Iterable[Call]:
    """The calls that a line makes or begins, in order."""
    match line:
        case MoveLine():
            return _moved(line)
        case GatherLine():
            return (call for move in line.moves for call in _moved(move))
        case CallLine():
            return _inner(line, "forward")
        case FunctionLine():
            return _inner(line.call, "forward")
        case FunctionBackward():
            return _inner(line.call, "backward")
        case GradientMove():
            return _reduced(line)
        case FusedGathers() | FusedReductions():
            return _fused([list(line_calls(member)) for member in line.members])
        case StartLine():
            return line_calls(line.move)
        case _:
            return ()


def _fused(calls: Sequence[Sequence[Call]]) -> Iterable[Call]:
    """The one call that stands for one of each; they must be alike."""
    every = [call for each in calls for call in each]
    if len(every) != len(calls) or len({call[:2] for call in every}) != 1:
        return every  # no call that is priced
    kind, axes, _ = every[0]
    return [(kind, axes, sum(size_bytes for _, _, size_bytes in every))]


def _moved(line: MoveLine) -> Iterable[Call]:
    kind = line.move.forward
    return [(kind, line.move.axes, line.forward_bytes)] if kind in COLLECTIVES else ()


def _reduced(line: GradientMove) -> Iterable[Call]:
    move = line.move.move
    if move.backward not in COLLECTIVES:
        return ()
    # All but gathers are counted by what they take: the gradient of the move's result.
    shape = line.out.shape if move.backward == "all_gather" else line.move.out.shape
    return [(move.backward, move.axes, math.prod(shape) * line.out.dtype.itemsize)]


def _inner(line: CallLine, phase: str) -> Iterable[Call]:
    return [(c.kind, line.lowered_axes, c.size_bytes) for c in line.inner if c.phase == phase]


def _compare(function: str, lines: Sequence[JointLine], priced: Sequence[RankCall]) -> None:
    made = [(call, number) for number, line in enumerate(lines) for call in line_calls(line)]
    expected = list(priced)
    if any(isinstance(line, WeightGradients) for line in lines):  # the second part has its own
        made.sort(key=lambda pair: pair[0])
        expected.sort(key=_call)
    for (call, number), wanted in zip(made, expected, strict=False):
        if call != _call(wanted):
            where = place(function, number, lines[number])
            raise error(f"it makes {_shown(call)}; priced is {_named(wanted)}", where)
    if len(made) > len(expected):
        call, number = made[len(expected)]
        where = place(function, number, lines[number])
        raise error(f"it makes {_shown(call)}, which is not priced", where)
    if len(made) < len(expected):
        raise error(f"it never makes {_named(expected[len(made)])}, which is priced", function)


def _call(call: RankCall) -> Call:
    return call.kind, call.axes, call.size_bytes


def _shown(call: Call) -> str:
    kind, axes, size_bytes = call
    return f"{kind} of {size_bytes} B over axes {axes}"


def _named(call: RankCall) -> str:
    return f"{_shown(_call(call))} ({call.tensor})"
