"""Reductions of gradients of activations, beside the matmuls of weight gradients.

Autograd computes both gradients of a matmul, then the sum over ranks of the input's begins, and
nothing runs beside it. Here the kernels that it needs come first:

    before    weight gradient, input gradient, sum            all_reduce
    after     input gradient, sum, start                      weight gradient, wait

Only the order of independent lines changes, so all bits stay. Only the lines of one matmul move,
the last one before the reduction: what they read is alive there anyway, so memory stays, too. No
line moves past one that communicates: all ranks run the same program, and calls keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement import COLLECTIVES
from autopar.program import (
    GradientMove,
    JointLine,
    KernelLine,
    ReadyLine,
    StartLine,
    WaitLine,
)

_MATMULS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.convolution_backward.")


def with_overlap(lines: Sequence[JointLine]) -> list[JointLine]:
    """The lines of backward with such reductions begun early; their waits stay in place."""
    found: list[JointLine] = []
    for line in lines:
        if isinstance(line, GradientMove) and _overlaps(line):
            start = _last_matmul(found)
            first, later = _divided(found[start:], line)
            if any(_is_matmul(x) for x in later):
                pending = f"{line.out.name}_coming"
                found[start:] = [*first, StartLine(line, pending), *later]
                found.append(WaitLine(line, pending))
                continue
        found.append(line)
    return found


def _last_matmul(lines: Sequence[JointLine]) -> int:
    """Where the last operator begins, if it is a matmul; views and sums may follow it."""
    key: str | None = None
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i]
        if not _may_move(line):
            return i + 1
        if isinstance(line, KernelLine) and line.key and line.key != key:
            if key is not None or not (line.is_view or _is_matmul(line)):
                return i + 1
            key = line.key if _is_matmul(line) else None
    return 0


def _is_matmul(line: JointLine) -> bool:
    return isinstance(line, KernelLine) and line.target.startswith(_MATMULS)


def _overlaps(line: GradientMove) -> bool:
    return line.phase == "backward" and line.move.move.backward in COLLECTIVES


def _may_move(line: JointLine) -> bool:
    """Not a kernel that writes to its argument: others read that before."""
    if isinstance(line, KernelLine):
        return not line.is_forward and not line.target.split(".")[1].endswith("_")
    return isinstance(line, ReadyLine)


def _divided(
    lines: Sequence[JointLine], move: GradientMove
) -> tuple[list[JointLine], list[JointLine]]:
    """The lines that `move` needs, and the others; both in order."""
    needed = {move.source}
    first: list[JointLine] = []
    later: list[JointLine] = []
    for line in reversed(lines):
        if needed.isdisjoint(line.writes):
            later.append(line)
        else:
            first.append(line)
            needed.update(line.reads)
    return first[::-1], later[::-1]
