"""One stage's program both ways as data: the lines of forward, what is saved, those of backward.

`passes/backward` makes it from a `StageProgram`. Forward has the stage's own lines. An operator
whose backward needs what the operator hides (the statistics of a layer norm, the log-sum-exp of
attention) is written out as its kernels. Backward has the kernels that autograd would run, in its
order, the reshards of gradients, the lines that run again, and the parameters that are
gathered again, where `order.py` says. Neither function needs autograd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch

from autopar.placement import Spec
from autopar.program.lines.stage_program import (
    CallLine,
    DetachLine,
    GatherLine,
    MoveLine,
    StageProgram,
)
from autopar.program.lines.variables import UNUSED, Assignment, Operation, Results


@dataclass(frozen=True)
class Variable:
    """A tensor on one rank; `spec` is None for an intermediate of an operator."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KernelLine(Operation):
    """One kernel of the operator `key`: of its backward, or of its forward, written out.

    A sum of gradients has no key. `is_view` says that its results view its first argument.
    """

    outs: tuple[Variable, ...]
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str
    where: str = ""
    is_forward: bool = False
    is_view: bool = False


@dataclass(frozen=True)
class GradientMove(Assignment):
    """The backward of one move: the gradient `source` of its result becomes that of its input."""

    out: Variable
    source: str
    move: MoveLine

    @property
    def phase(self) -> str:
        return "grad_sync" if self.move.phase == "param_gather" else "backward"


class _Fused:
    """Lines that run as one call."""

    members: tuple[Any, ...]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(member.source for member in self.members)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return tuple(member.out.name for member in self.members)


@dataclass(frozen=True)
class FusedGathers(_Fused):
    """Gathers of parameters that run as one call (`gathers.py`)."""

    members: tuple[GatherLine, ...]


@dataclass(frozen=True)
class FusedReductions(_Fused):
    """Reductions of gradients that run as one call (`gathers.py`)."""

    members: tuple[GradientMove, ...]


Communication = GradientMove | GatherLine | FusedGathers | FusedReductions | MoveLine


@dataclass(frozen=True)
class StartLine:
    """Begins a communication; `pending` is its handle."""

    move: Communication
    pending: str

    @property
    def reads(self) -> tuple[str, ...]:
        return self.move.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.pending,)


@dataclass(frozen=True)
class WaitLine:
    """Waits for a communication that was begun, and makes its results."""

    move: Communication
    pending: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.pending,)

    @property
    def writes(self) -> tuple[str, ...]:
        return self.move.writes


@dataclass(frozen=True)
class FreeLine:
    """Drops variables after their last use; that reads none."""

    names: tuple[str, ...]
    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class FunctionLine:
    """A function with a backward of its own (`runtime/lowered`), in place of an operator.

    Beside the results of `call` it makes `kept`, a tuple that its backward takes. `differentiable`
    says which of its tensor arguments have a gradient. An operator that `runtime/lowered` does not
    have is taped.
    """

    call: CallLine
    kept: str
    differentiable: tuple[bool, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return self.call.reads

    @cached_property
    def writes(self) -> tuple[str, ...]:
        return (*self.call.writes, self.kept)


@dataclass(frozen=True)
class FunctionBackward(Results):
    """The backward of a `FunctionLine`.

    inputs      the arguments that it takes again
    gradients   those of the results; None for a result without
    outs        gradients of all tensor arguments, in order; `UNUSED` where none is wanted
    """

    outs: tuple[Variable, ...]
    call: CallLine
    kept: str
    inputs: tuple[str | None, ...]
    gradients: tuple[str | None, ...]

    @property
    def wanted(self) -> tuple[bool, ...]:
        return tuple(out.name != UNUSED for out in self.outs)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        given = (*self.inputs, *self.gradients)
        return (self.kept, *(name for name in given if name is not None))


@dataclass(frozen=True)
class ReadyLine:
    """Hands over the gradient of the variable `taken[position]`, which is complete.

    Whoever gets it may write to it, so one that later lines read is copied (`is_shared`).
    """

    position: int
    source: str
    is_shared: bool
    writes: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,)


@dataclass(frozen=True)
class LossAtEnd:
    """Parts forward: the lines after it make the loss when the step ends (`loss_at_end.py`)."""

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class WeightGradients:
    """Parts backward: the lines after it only make gradients of parameters (`order.py`)."""

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()


JointLine = (
    MoveLine
    | CallLine
    | DetachLine
    | GatherLine
    | FreeLine
    | KernelLine
    | GradientMove
    | FusedGathers
    | FusedReductions
    | StartLine
    | WaitLine
    | FunctionLine
    | FunctionBackward
    | ReadyLine
    | LossAtEnd
    | WeightGradients
)


@dataclass(frozen=True)
class JointProgram:
    """Forward and backward of one microbatch of `stage`.

    forward      takes what the stage takes; returns its results, and `saved`. Lines after a
                 `LossAtEnd` wait for the end of the step; until then the loss is what they read
    saved        variables of forward that backward reads
    cotangents   names of the gradients that backward is given: of the loss if there is one, then of
                 each sent value; None where no gradient is taken
    backward     takes `saved` and `cotangents`, and hands over the gradients of the variables that
                 `taken` lists, each as soon as it is complete
    stands_for   block (`model.layers.2`) -> of how many blocks its lines are, from it on; the
                 others of them have no lines
    """

    stage: StageProgram
    forward: tuple[JointLine, ...]
    saved: tuple[str, ...] = ()
    cotangents: tuple[str | None, ...] = ()
    backward: tuple[JointLine, ...] = ()
    stands_for: Mapping[str, int] = field(default_factory=dict)

    @property
    def taken(self) -> tuple[str, ...]:
        """The variables that forward takes and may have a gradient: parameters, then received."""
        return (*taken_parameters(self.stage), *(b.local.name for b in self.stage.received))

    @cached_property
    def backward_parts(self) -> tuple[Sequence[JointLine], Sequence[JointLine]]:
        """The lines of backward before and after its `WeightGradients`; without one, all before."""
        lines = self.backward
        at = next((i for i, x in enumerate(lines) if isinstance(x, WeightGradients)), len(lines))
        return lines[:at], lines[at + 1 :]

    @cached_property
    def kept_variables(self) -> tuple[str, ...]:
        """The variables that the second part of backward takes from the first, in order."""
        made, needed = set[str](), dict[str, None]()
        for line in self.backward_parts[1]:
            needed |= dict.fromkeys(name for name in line.reads if name not in made)
            made.update(line.writes)
        there = {*self.saved, *self.cotangents}
        there.update(name for line in self.backward_parts[0] for name in line.writes)
        return tuple(name for name in needed if name in there)


def taken_parameters(stage: StageProgram) -> tuple[str, ...]:
    """The parameters as forward takes them: shards that it gathers itself, or ready placements."""
    found: list[str] = []
    for parameter in stage.parameters:
        if parameter.period == "use":
            found.append(parameter.shard.name)
        found += [use.local.name for use in parameter.uses]
    return tuple(found)


def communications(line: JointLine) -> tuple[GatherLine | GradientMove, ...]:
    """The gathers of parameters, or the moves of gradients, that a line makes, begins or ends."""
    match line:
        case KernelLine() | FreeLine():
            return ()
        case GatherLine() | GradientMove():
            return (line,)
        case FusedGathers() | FusedReductions():
            return line.members
        case StartLine() | WaitLine():
            return communications(line.move)
        case _:
            return ()
