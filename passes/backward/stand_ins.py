"""The program of a stage both ways, from a few of its repeated blocks.

Equal blocks have equal lines, but for names. So the lines of a few are enough to print all
(`autopar/codegen/calls.py`), and the time to derive, prove and print a stage does not grow with
depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.program import (
    CallLine,
    JointProgram,
    ReadyLine,
    RepeatedLines,
    StageProgram,
    block_of,
)


def whole_joint(
    few: JointProgram, repeats: Sequence[RepeatedLines], whole: StageProgram
) -> JointProgram | None:
    """`few`, which has few of the repeated blocks of `whole`, as the program of `whole`.

    `repeats` says which lines of its stage stand for others. None if they are no module of their
    own (`model.layers.2`), or if blocks have more of their own than parameters.
    """
    stands_for = _stands_for(few.stage, repeats)
    if stands_for is None or few.stage.delivered != whole.delivered:
        return None
    joint = replace(few, stage=whole, stands_for=stands_for)
    place = {name: k for k, name in enumerate(joint.taken)}
    backward = tuple(
        replace(line, position=place[few.taken[line.position]])
        if isinstance(line, ReadyLine)
        else line
        for line in few.backward
    )
    return replace(joint, backward=backward)


def _stands_for(stage: StageProgram, repeats: Sequence[RepeatedLines]) -> Mapping[str, int] | None:
    """Block -> for how many it stands; None if there are none, or one is no module of its own."""
    of = [block_of(line.key) if isinstance(line, CallLine) else None for line in stage.body]
    found: dict[str, int] = {}
    for repeat in repeats:
        blocks = {*of[repeat.start : repeat.stop]} - {None}
        others = {*of[: repeat.start], *of[repeat.stop :]}
        block = blocks.pop() if len(blocks) == 1 else None
        if block is None or block in others:
            return None
        found[block] = repeat.count
    return found or None
