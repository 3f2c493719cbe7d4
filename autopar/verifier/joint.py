"""Verifies one joint program before it runs: forward and backward as lines (`verify_joint`).

    lines        forward has the lines of the stage, in order; operators that are written out are
                 there as kernels, which make the operator's results        (`_check_forward`)
    end          what waits for the end of the step makes the loss alone    (`_check_end`)
    parts        which gradients the parts of a backward that is split hand over
                                                                            (`_check_parts`)
    variables    names, storages, handles; what is saved; what runs again   (`joint_flow.py`)
    gradients    shapes, dtypes and placements; all are handed over         (`joint_gradients.py`)

`verify_program` has proved the stage's own lines, so these are taken as right here. Not proved:
that the kernels compute the derivative, and that the calls are those of `step_calls`. Kernels are
recorded from autograd, and calls follow the same order (`program/communication/order.py`); tests
compare steps, and every rank's calls with the list.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.program.communication import runs_of
from autopar.program.lines import (
    UNUSED,
    CallLine,
    FreeLine,
    FunctionLine,
    JointLine,
    JointProgram,
    KernelLine,
    Line,
    LossAtEnd,
    MoveLine,
    ReadyLine,
    StartLine,
    WaitLine,
    WeightGradients,
    communications,
    taken_parameters,
)
from autopar.verifier.joint_flow import (
    Fault,
    Flow,
    check_flow,
    check_reruns,
    error,
    place,
)
from autopar.verifier.joint_gradients import check_gradients
from autopar.verifier.stage import words_of


def verify_joint(joint: JointProgram) -> None:
    """Raise `VerificationError`, naming the line and the reason, unless all invariants hold."""
    _check_forward(joint)
    _check_end(joint)
    _check_parts(joint)
    _check_variables(joint)
    check_gradients(joint)


def _check_variables(joint: JointProgram) -> None:
    stage = joint.stage
    words = words_of(stage)
    taken = frozenset(
        {
            *taken_parameters(stage),
            *(item.local.name for item in stage.delivered),
            *(boundary.local.name for boundary in stage.received),
        }
    )
    returned = {*stage.returned, *joint.saved}
    check_flow("forward", Flow(taken, taken, taken, words), joint.forward, returned)
    given = {name for name in joint.cotangents if name is not None}
    saved = frozenset(joint.saved)
    flow = Flow(saved | given, frozenset(), saved, words, is_backward=True)
    first, second = joint.backward_parts
    check_flow("backward", flow, first, joint.kept_variables)
    if stage.splits_backward:
        check_flow("the second part of backward", flow, second, ())
    check_reruns(joint)


def _check_parts(joint: JointProgram) -> None:
    """Raise unless backward has two parts if it is split: the first hands over the gradients of
    what was received, the second those of parameters."""
    n_parts = 1 + sum(isinstance(line, WeightGradients) for line in joint.backward)
    if n_parts != 1 + joint.stage.splits_backward:
        raise error(f"it has {n_parts} parts", f"backward of {joint.stage.name}")
    n_parameters = len(taken_parameters(joint.stage))
    for is_second, lines in enumerate(joint.backward_parts if n_parts > 1 else ()):
        for number, line in enumerate(lines):
            if isinstance(line, ReadyLine) and (line.position < n_parameters) != is_second:
                raise error("it is handed over in the wrong part", place("backward", number, line))


def _check_forward(joint: JointProgram) -> None:
    """Raise unless forward is the stage's body; kernels stand for operators that have no line."""
    body = joint.stage.body
    at = {id(line): i for i, line in enumerate(body)}
    by_key = {line.key: i for i, line in enumerate(body) if isinstance(line, CallLine)}
    last, whole, runs = -1, set[int](), runs_of(joint.stage)
    for number, line in enumerate(joint.forward):
        if isinstance(line, FreeLine | StartLine):
            continue
        if isinstance(line, LossAtEnd):
            last = -1  # what waits was before lines that do not need it
            continue
        if isinstance(line, WaitLine) and isinstance(line.move, MoveLine):
            line = line.move
        if gathers := communications(line):
            for gather in gathers:
                i = at.get(id(gather), -1)
                if i < 0 or i in whole or runs[i][0] < last:
                    where = place("forward", number, line)
                    raise error(f"the stage does not gather {gather.out.name} there", where)
                whole.add(i)
            last = runs[i][0]
            continue
        try:
            i = _position(line, at, by_key)
            if i < last or i in whole:
                raise Fault("it is not where the stage has it")
            if isinstance(line, KernelLine):
                _makes(line, body[i])
            elif not _is_same(line, body[i]):
                raise Fault("the stage has another line there")
            else:
                whole.add(i)
        except Fault as fault:
            raise error(str(fault), place("forward", number, line)) from None
        last = i
    for i, original in enumerate(body):
        if not isinstance(original, CallLine) and i not in whole:
            raise error(f"{original.out.name} is not made", "forward")


def _check_end(joint: JointProgram) -> None:
    """Raise unless the lines that wait for the end of the step make the loss, and nothing else."""
    ends = [i for i, line in enumerate(joint.forward) if isinstance(line, LossAtEnd)]
    if not ends:
        return
    if len(ends) > 1:
        raise error("forward has ended already", place("forward", ends[1], joint.forward[ends[1]]))
    late = {name for line in joint.forward[ends[0] :] for name in line.writes}
    if early := late & {*joint.stage.held, *joint.saved}:
        raise error(f"{min(early)} is made when the step ends, and needed before", "forward")
    if joint.stage.loss not in late:
        raise error("the loss is not made there", place("forward", ends[0], LossAtEnd()))


def _position(line: JointLine, at: dict[int, int], by_key: dict[str, int]) -> int:
    """Where in the body a line of forward, or the operator that it is part of, stands."""
    match line:
        case KernelLine():
            found = by_key.get(line.key)
        case CallLine() | FunctionLine():
            call = line.call if isinstance(line, FunctionLine) else line
            found = at.get(id(call), by_key.get(call.key))
        case _:
            found = at.get(id(line))
    if found is None:
        raise Fault("the stage has no such line")
    return found


def _is_same(line: JointLine, original: Line) -> bool:
    call = line.call if isinstance(line, FunctionLine) else line
    if call is original:
        return True
    if not isinstance(call, CallLine) or not isinstance(original, CallLine):
        return False
    # Backward may read a result that forward has no name for.
    outs = tuple(
        mine if theirs.name == UNUSED and mine == replace(theirs, name=mine.name) else theirs
        for mine, theirs in zip(call.outs, original.outs, strict=True)
    )
    return call == replace(original, outs=outs)


def _makes(line: KernelLine, original: Line) -> None:
    """Raise `Fault` unless the results of the operator that a kernel makes have its types."""
    assert isinstance(original, CallLine)
    if not line.is_forward:
        raise Fault("it is a line of backward")
    types = {out.name: (out.shape, out.dtype, out.spec) for out in original.outs}
    for out in line.outs:
        found = out.shape, out.dtype, out.spec
        if out.name != UNUSED and out.spec is not None and types.get(out.name, found) != found:
            raise Fault(f"{out.name} is not what {original.key} makes")
