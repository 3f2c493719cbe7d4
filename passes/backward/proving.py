"""Every stage both ways, verified; a deep one by the lines of few of its repeated blocks.

Equal blocks have equal lines, but for names. So the lines of a few are enough to print all
(`autopar/codegen/calls.py`), and the time to derive, prove and print a stage does not grow with
depth. A split backward is printed line by line, so all of its lines are derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from autopar.codegen import prints_all
from autopar.passes.backward.fusible import make_fusible
from autopar.passes.backward.joint import differentiate
from autopar.program.lines import (
    CallLine,
    JointProgram,
    Pipeline,
    ReadyLine,
    RepeatedLines,
    StageProgram,
)
from autopar.verifier import verify_joint


def proved(
    pipeline: Pipeline,
    device: str = "cpu",
    few_blocks: Sequence[StageProgram | None] = (),
) -> tuple[JointProgram, ...]:
    """Every stage both ways, verified; for a pipeline without gradients, forward only.

    `few_blocks` has each stage with few of its repeated blocks. Where the text of all follows from
    theirs, the other blocks have no lines.
    """

    def both_ways(stage: StageProgram) -> JointProgram:
        joint = differentiate(stage, device)
        joint = make_fusible(joint) if stage.is_compiled else joint
        verify_joint(joint)
        return joint

    trains = pipeline.schedule.trains
    joints: list[JointProgram] = []
    for stage, few in zip_longest(pipeline.stages, few_blocks):
        whole, joint = replace(stage, trains=trains), None
        if few is not None and few.delivered == whole.delivered and not whole.splits_backward:
            alone = both_ways(replace(few, trains=trains, repeats=()))
            joint = _standing_for(whole, alone, few.repeats)
        if joint is None or not prints_all(joint):
            joint = both_ways(whole)
        joints.append(joint)
    return tuple(joints)


def _standing_for(
    whole: StageProgram, few: JointProgram, repeats: Sequence[RepeatedLines]
) -> JointProgram | None:
    """The program of `whole` by the lines of few of its blocks; None if one that stands for others
    is no module of its own (`model.layers.2`)."""
    of = [line.block if isinstance(line, CallLine) else None for line in few.stage.body]
    stands_for: dict[str, int] = {}
    for repeat in repeats:
        block, *more = {*of[repeat.start : repeat.stop]} - {None} or {None}
        if block is None or more or block in (*of[: repeat.start], *of[repeat.stop :]):
            return None
        stands_for[block] = repeat.count
    joint = replace(few, stage=whole, stands_for=stands_for)
    place = {name: k for k, name in enumerate(joint.taken)}
    backward = tuple(
        replace(line, position=place[few.taken[line.position]])
        if isinstance(line, ReadyLine)
        else line
        for line in few.backward
    )
    return replace(joint, backward=backward)
