"""Hands over gradients behind the operators of their block, so that these can be one region.

A gradient of a parameter is handed over as soon as it is complete, which cuts what a compiler may
fuse. Here it waits for the end of its block, or for the next line that communicates, if that is
earlier. So nothing changes its place before or behind a start or a wait. The gradients of a block
live until its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.program.lines import (
    CallLine,
    FreeLine,
    JointLine,
    JointProgram,
    KernelLine,
    ReadyLine,
    is_compilable,
)


def hand_over_late(joint: JointProgram) -> JointProgram:
    """The program with every `ready` at the end of the run of operators that it stands in."""
    blocks = {line.key: line.block for line in joint.stage.body if isinstance(line, CallLine)}
    run = _Run()
    block: str | None = None
    for line in joint.backward:
        if isinstance(line, ReadyLine):
            run.waiting.append(line)
        elif isinstance(line, FreeLine):
            run.free(line)
        else:
            here = blocks.get(getattr(line, "key", ""), block)
            if not is_compilable(line) or here != block or run.is_overwritten(line):
                run.end()
            block = here
            run.add(line)
    run.end()
    return replace(joint, backward=tuple(run.lines))


@dataclass
class _Run:
    """Lines in their new order; `waiting` gradients are handed over next, then `freed`."""

    lines: list[JointLine] = field(default_factory=list)
    waiting: list[ReadyLine] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    # Name -> the name whose memory it has.
    owner: dict[str, str] = field(default_factory=dict)

    def add(self, line: JointLine) -> None:
        if isinstance(line, KernelLine) and (line.is_view or _is_in_place(line)):
            (first, *_) = line.reads
            for name in line.writes:
                self.owner[name] = self.owner.get(first, first)
        self.lines.append(line)

    def free(self, line: FreeLine) -> None:
        held = {ready.source for ready in self.waiting}
        self.freed += [name for name in line.names if name in held]
        if names := tuple(name for name in line.names if name not in held):
            self.lines.append(FreeLine(names))

    def is_overwritten(self, line: JointLine) -> bool:
        """Does a line write to a gradient that waits?"""
        if not (isinstance(line, KernelLine) and _is_in_place(line)):
            return False
        first = line.reads[0]
        waiting = {self.owner.get(ready.source, ready.source) for ready in self.waiting}
        return self.owner.get(first, first) in waiting

    def end(self) -> None:
        self.lines += self.waiting
        if self.freed:
            self.lines.append(FreeLine(tuple(self.freed)))
        self.waiting, self.freed = [], []


def _is_in_place(line: KernelLine) -> bool:
    return line.target.split(".")[1].endswith("_")
