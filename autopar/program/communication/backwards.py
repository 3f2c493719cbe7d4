"""The backwards of the lines of a stage, in two parts if its program splits backward.

    first     gradients of activations: of what depends on the batch, or on an earlier stage
    second    gradients that only parameters need, and their reductions

A matmul of an activation by a weight is divided: the gradient of the activation is in the first
part, those of the weight and of a bias in the second. An operator that reads no activation with a
gradient (an embedding, a cast of a weight) is in the second part as a whole. Any other operator is
in the first as a whole: the backward of norms, attention and convolutions is one kernel for all of
its gradients. Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.

All terms of a gradient are made in one part, so they are added in the order that they always had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.caching import once
from autopar.program.communication.gathers import gathers_at, reduced_runs
from autopar.program.lines import CallLine, GatherLine, Line, StageProgram

# Of a matmul's backward: all of it, the gradient that others wait for, or the other one.
Part = Literal["whole", "input", "weight"]
# Matmuls of two tensors whose gradients are a matmul each; some add a bias.
MATMULS = tuple(
    f"aten.{word}.default" for word in ("linear", "addmm", "mm", "bmm", "matmul", "einsum")
)


@dataclass(frozen=True)
class Backward:
    """The backward of the operator or reshard at `position`, or a part of it.

    `apart` is the variable whose gradient the part "input" makes, and "weight" does not.
    """

    position: int
    part: Part = "whole"
    apart: str = ""

    def makes(self, name: str) -> bool:
        """Does it make the gradient of a variable that the operator reads?"""
        return self.part == "whole" or (name == self.apart) == (self.part == "input")

    def reads(self, name: str) -> bool:
        """Does it read a variable that the operator reads and keeps?"""
        return self.part == "whole" or not self.makes(name)


def backwards(
    program: StageProgram, positions: range
) -> tuple[tuple[Backward, ...], tuple[Backward, ...]]:
    """The backwards of the lines at some positions, in both parts, last line first.

    That of a gather is the reduction of its gradient.
    """
    late = _late_gradients(program)
    first, second = list[Backward](), list[Backward]()
    for i in reversed(positions):
        if i not in program.differentiated:
            continue
        if apart := late.get(i):
            first.append(Backward(i, "input", apart))
            second.append(Backward(i, "weight", apart))
        else:
            (second if i in late else first).append(Backward(i))
    return tuple(first), tuple(second)


def is_late(program: StageProgram, position: int) -> bool:
    """Is all of the backward of a line in the second part?"""
    return _late_gradients(program).get(position) == ""


@once
def _late_gradients(program: StageProgram) -> Mapping[int, str]:
    """Position of a line whose backward is late -> the variable whose gradient is not; "" if all
    are. Empty if backward is not split."""
    if not program.splits_backward:
        return {}
    activations, late = _activations(program), dict[int, str]()
    reads = {i: _differentiable(program, program.body[i].reads) for i in program.differentiated}
    for i, read in reads.items():
        line, own = program.body[i], [name for name in read if name in activations]
        if not own and not isinstance(line, GatherLine):
            late[i] = ""
        elif len(own) == 1 and len(read) > 1 and _is_matmul(line):
            late[i] = own[0]
    while wrong := _early_terms(program, reads, late, activations):
        for i in wrong:
            del late[i]
    made = {name for i, own in late.items() for name in reads[i] if name != own}
    for run in reduced_runs(program).values():
        if any(line.out.name in made for line in gathers_at(program, run)):
            late |= dict.fromkeys(run, "")
    return late


def _activations(program: StageProgram) -> set[str]:
    """The variables that depend on the batch or on another stage."""
    found = {b.local.name for b in program.received}
    found |= {item.local.name for item in program.delivered if item.kind == "input"}
    for line in program.body:
        if not found.isdisjoint(line.reads):
            found.update(line.writes)
    return found


def _differentiable(program: StageProgram, names: Iterable[str]) -> dict[str, None]:
    """The variables among some names that have a gradient."""
    known = program.variables
    return {name: None for name in names if name in known and known[name].has_grad}


def _is_matmul(line: Line) -> bool:
    return isinstance(line, CallLine) and line.lowered is None and line.target in MATMULS


def _early_terms(
    program: StageProgram,
    reads: Mapping[int, Iterable[str]],
    late: Mapping[int, str],
    activations: set[str],
) -> list[int]:
    """The late backwards that make a term of a gradient that the first part makes or takes."""
    early: set[str] = set()
    for i, read in reads.items():
        if i not in late and not isinstance(program.body[i], GatherLine):
            early.update(read, program.body[i].writes)
    early -= activations
    return [i for i, own in late.items() if any(n in early and n != own for n in reads[i])]
