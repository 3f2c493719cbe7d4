"""Rewrites backward so that the operators of a block can be one region, which a compiler fuses.

A gradient of a parameter is handed over as soon as it is complete, which cuts a region. Here it
waits for the end of its block, or for the next line that communicates, if that is earlier. So
nothing passes a start or a wait. The gradients of a block live until its end.

Sums of gradients are written into new memory: compilers handle what writes to its inputs worse, and
a gradient that waits must not change.
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


def make_fusible(joint: JointProgram) -> JointProgram:
    """The program with every `ready` behind the operators that it stands between."""
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
            if not is_compilable(line) or here != block:
                run.end()
            block = here
            run.lines.append(_into_new_memory(line))
    run.end()
    return replace(joint, backward=tuple(run.lines))


@dataclass
class _Run:
    """Lines in their new order; `waiting` gradients are handed over next, then `freed`."""

    lines: list[JointLine] = field(default_factory=list)
    waiting: list[ReadyLine] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    def free(self, line: FreeLine) -> None:
        held = {ready.source for ready in self.waiting}
        self.freed += [name for name in line.names if name in held]
        if names := tuple(name for name in line.names if name not in held):
            self.lines.append(FreeLine(names))

    def end(self) -> None:
        self.lines += self.waiting
        if self.freed:
            self.lines.append(FreeLine(tuple(self.freed)))
        self.waiting, self.freed = [], []


def _into_new_memory(line: JointLine) -> JointLine:
    """`aten.add_.Tensor` -> `aten.add.Tensor`; any other line as it is."""
    if not isinstance(line, KernelLine):
        return line
    name, _, overload = line.target.rpartition(".")
    return replace(line, target=f"{name[:-1]}.{overload}") if name.endswith("_") else line
