"""Writes the backward of a lowered stage as kernels, in autograd's own order.

Autograd runs the backward of operators in the reverse order of their creation, and adds gradients
of one tensor in the order in which they arrive. So does this walk, and the kernels are the same:
on one rank a step equals that of autograd bit for bit.

    for all work in backward's order          (`autopar/program/communication/order.py`)
        operator                        the kernels of its derivative  (`templates.py`)
        reshard                         the reshard of the gradient    (its row of the table)
        line that runs again            its kernels in forward
        gathers, reductions             their lines
    then                                what is saved, what is freed   (`provision.py`)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from autopar.passes.backward.kernels import KernelPrinter, call_of
from autopar.passes.backward.names import Names
from autopar.passes.backward.provision import finished
from autopar.passes.backward.recording import (
    Meta,
    contiguous_meta,
    contiguous_stride,
    run_on_fakes,
    sum_meta,
)
from autopar.passes.backward.templates import Call, Template, result_metas, template
from autopar.placement import gradient_spec
from autopar.program.communication import (
    Backward,
    Forward,
    Gather,
    Reduction,
    Start,
    Wait,
    Work,
    backward_parts,
    forward_order,
    gathers_at,
    positions_of,
)
from autopar.program.lines import (
    UNUSED,
    CallLine,
    Communication,
    DetachLine,
    FunctionBackward,
    FunctionLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    Local,
    LossAtEnd,
    MoveLine,
    Ref,
    StageProgram,
    StartLine,
    Variable,
    WaitLine,
    WeightGradients,
    reserved_names,
    taken_parameters,
)
from autopar.runtime.lowered import LOWERED


class _Made(NamedTuple):
    """A gradient of the variable `of`, or a term of it."""

    of: str
    gradient: str
    meta: Meta


def differentiate(stage: StageProgram, device: str = "cpu") -> JointProgram:
    """Forward and backward of a stage as lines.

    A program that does not train has no backward. `device` is the type of device that the kernels
    are for: "cpu" or "cuda".
    """
    return _Walk(stage, device).run()


@dataclass
class _Walk:
    stage: StageProgram
    device: str
    metas: dict[str, Meta] = field(default_factory=dict)
    locals: dict[str, Local] = field(default_factory=dict)
    # Variable -> its gradient so far; and metas of gradients.
    gradients: dict[str, str] = field(default_factory=dict)
    gradient_metas: dict[str, Meta] = field(default_factory=dict)
    # Sums of gradients whose strides are not those of the first term.
    moved: set[str] = field(default_factory=set)
    # Which kernels the lines that run again are is known when the walk has passed them.
    backward: list[JointLine | Forward] = field(default_factory=list)
    forward: dict[int, list[JointLine]] = field(default_factory=dict)
    # Position of an operator -> variables of the slots that its forward hands on; and the lines of
    # its forward that come before its result, such as copies of its arguments.
    kept: dict[int, dict[int, str]] = field(default_factory=dict)
    copies: dict[int, list[JointLine]] = field(default_factory=dict)
    # Calls that were begun: their ends, and the moves that make their results, by variable.
    under_way: dict[Work, tuple[WaitLine, dict[str, GradientMove]]] = field(default_factory=dict)
    # Position of a divided matmul -> what is left of its backward: lines, and gradients.
    left: dict[int, tuple[list[JointLine], list[_Made]]] = field(default_factory=dict)
    # Position of an operator -> its call, and the variables of its slots.
    calls: dict[int, tuple[Call, list[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = {*self.stage.arguments, *self.stage.variables}
        self.names = Names(taken | reserved_names(self.stage.axis_names))
        # Lines of segments that do not run again.
        self.kept_lines = {
            i for s in self.stage.segments for i in range(s.start, s.stop) if i not in s.again
        }

    def run(self) -> JointProgram:
        stage = self.stage
        self._arguments()
        for i, line in enumerate(stage.body):
            self.forward[i] = [line]
            self._results(i, line)
        if not stage.trains:
            return finished(stage, self._ordered(), [], (), ())
        cotangents = self._cotangents()
        first, second = backward_parts(stage)
        marker = [WeightGradients()] if stage.splits_backward else []
        for work in (*first, *marker, *second):
            match work:
                case Forward() | WeightGradients():
                    self.backward.append(work)
                case Backward(i, "weight"):
                    self._make(work, *self.left.pop(i, ((), ())))
                case Backward():
                    self._line(work)
                case Start(Backward() as call):
                    self._line(call, True)
                case Reduction(positions):
                    self._reduce(positions)
                case Start(Reduction(positions) as call):
                    self._reduce(positions, call)
                case Wait(Reduction() | Backward() as call):
                    self._wait(call)
                case Gather() | Start() | Wait():
                    self.backward.append(self._communication(work))
        backward: list[JointLine] = []
        for item in self.backward:
            backward += self.forward.get(item.position, ()) if isinstance(item, Forward) else [item]
        taken = (*taken_parameters(stage), *(b.local.name for b in stage.received))
        lost = self.gradients.keys() - {*taken}
        assert not lost, f"no line takes the gradients of {', '.join(sorted(lost))}"
        gradients = tuple(self.gradients.get(name) for name in taken)
        return finished(stage, self._ordered(), backward, cotangents, gradients, self.moved)

    def _ordered(self) -> list[JointLine]:
        lines: list[JointLine] = []
        for work in forward_order(self.stage):
            match work:
                case Forward(i):
                    lines += self.forward.get(i, ())
                case Wait(Forward()):
                    lines += LossAtEnd(), self._communication(work)
                case Gather() | Start() | Wait():
                    lines.append(self._communication(work))
        return lines

    def _communication(self, work: Gather | Start | Wait) -> JointLine:
        """Parameters are gathered, or the loss is summed; or that begins, or ends."""
        first = self.stage.body[positions_of(work)[0]]
        members = tuple(gathers_at(self.stage, positions_of(work)))
        line = FusedGathers(members) if len(members) > 1 else first
        assert isinstance(line, FusedGathers | GatherLine | MoveLine)
        match work:
            case Start():
                return StartLine(line, _handle(line))
            case Wait():
                return WaitLine(line, _handle(line))
            case _:
                return line

    def _arguments(self) -> None:
        stage = self.stage
        for local in (b.local for b in stage.received):
            self._define(local, self.device)
        for item in stage.delivered:
            self._define(item.local, "cpu" if item.kind == "seed" else self.device)
        for p in stage.parameters:
            for local in (p.shard, *(use.local for use in p.uses)):
                self._define(local, self.device)

    def _define(self, local: Local, device: str) -> None:
        stride = contiguous_stride(local.shape)
        has_grad = local.has_grad and _is_continuous(local.dtype)
        self.metas[local.name] = Meta(local.shape, stride, local.dtype, device, has_grad)
        self.locals[local.name] = local

    def _results(self, i: int, line: object) -> None:
        """What a line of forward makes, with strides."""
        match line:
            case MoveLine() | GatherLine():
                self._define(line.out, self.device)
            case DetachLine():
                self.locals[line.out.name] = line.out
                self.metas[line.out.name] = self.metas[line.source]._replace(has_grad=False)
            case CallLine(lowered=None):
                call, _ = self.calls[i] = call_of(line, self.metas, self.device)
                for out, meta in zip(line.outs, result_metas(call), strict=True):
                    if out.name != UNUSED and meta is not None:
                        self.locals[out.name] = out
                        has_grad = out.has_grad and _is_continuous(meta.dtype)
                        self.metas[out.name] = meta._replace(has_grad=has_grad)
            case CallLine():
                for out in line.outs:
                    if out.name != UNUSED:
                        self._define(out, self.device)
                like = LOWERED[line.lowered or ""].like
                if like is not None:
                    call, _ = call_of(line, self.metas, self.device)
                    results = run_on_fakes(like, call.args, call.kwargs, call.metas)
                    for out, meta in zip(line.outs, results, strict=True):
                        if out.name != UNUSED and meta is not None:
                            meta = meta._replace(has_grad=self.metas[out.name].has_grad)
                            self.metas[out.name] = meta

    def _cotangents(self) -> tuple[str | None, ...]:
        """The gradients that backward is given, by name."""
        stage, found = self.stage, list[str | None]()
        for name in (*([stage.loss] if stage.loss else []), *(s.local.name for s in stage.sent)):
            if not self.metas[name].has_grad:
                found.append(None)
                continue
            variable = self._gradient_variable(name)
            found.append(variable.name)
            self._add(name, variable.name, contiguous_meta(self.metas[name]))
        return tuple(found)

    def _line(self, work: Backward, is_early: bool = False) -> None:
        """The backward of a line; `is_early`: it is a move that is only begun."""
        line = self.stage.body[work.position]
        match line:
            case MoveLine():
                self._move(line, work if is_early else None)
            case CallLine():
                given = [self.gradients.pop(out.name, None) for out in line.outs]
                if any(name is not None for name in given):
                    if line.lowered is None:
                        self._operator(work, line, given)
                    else:
                        self._function(work, line, given)

    def _make(self, work: Backward, lines: Sequence[JointLine], made: Sequence[_Made]) -> None:
        """The lines of an operator's backward, or those that the gradient of `work.apart` needs."""
        if work.part == "input":
            wanted = [one for one in made if work.makes(one.of)]
            others = [one for one in made if not work.makes(one.of)]
            lines, later = _divided(lines, {one.gradient for one in wanted})
            self.left[work.position] = later, others
            made = wanted
        self.backward += lines
        for one in made:
            self._add(*one)

    def _move(self, line: MoveLine, begun: Work | None) -> None:
        gradient = self.gradients.pop(line.out.name, None)
        if gradient is None or not line.has_grad:
            return
        if line.move.backward == "identity":
            self._add(line.source, gradient, self.gradient_metas[gradient])
            return
        out = self._gradient_variable(line.source)
        move = GradientMove(out, gradient, line)
        self._communicate(move, {line.source: move}, begun)

    def _reduce(self, positions: Sequence[int], begun: Reduction | None = None) -> None:
        """Reduce the gradients of parameters by one call, which is waited for if it is `begun`."""
        lines = [x for x in gathers_at(self.stage, positions) if x.out.name in self.gradients]
        if not lines:
            return
        gradients = [self._in_reduced_dtype(line) for line in lines]
        if len(lines) == 1:
            members = self._storage_moves(lines[0], gradients[0])
            self.backward += members[:-1]
            reduction: GradientMove | FusedReductions = members[-1]
        else:
            members = []
            for line, gradient in zip(lines, gradients, strict=True):
                out = self._reduced(line, self.locals[line.source], gradient)
                members.append(GradientMove(out, gradient, line.moves[0]))
            reduction = FusedReductions(tuple(members))
        results = dict(zip([line.source for line in lines], members[-len(lines) :], strict=True))
        self._communicate(reduction, results, begun)

    def _communicate(
        self,
        line: GradientMove | FusedReductions,
        results: dict[str, GradientMove],
        begun: Work | None,
    ) -> None:
        """Gradients are moved by one call, which is waited for if it is `begun`."""
        if begun is None:
            self.backward.append(line)
            self._add_results(results)
        else:
            self.backward.append(StartLine(line, _handle(line)))
            self.under_way[begun] = WaitLine(line, _handle(line)), results

    def _wait(self, call: Work) -> None:
        """The gradients that a call moves are there."""
        if call in self.under_way:
            line, results = self.under_way.pop(call)
            self.backward.append(line)
            self._add_results(results)

    def _add_results(self, results: Mapping[str, GradientMove]) -> None:
        for source, member in results.items():
            self._add(source, member.out.name, self._reduced_meta(member))

    def _in_reduced_dtype(self, line: GatherLine) -> str:
        """The gradient of a gathered parameter, in the dtype in which it is reduced."""
        gradient = self.gradients.pop(line.out.name)
        meta = self.gradient_metas[gradient]
        dtype = line.out.gradient_dtype or meta.dtype
        if dtype == meta.dtype:
            return gradient
        cast = Variable(self.names.new(f"{gradient}_reduced"), meta.shape, dtype)
        args, kwargs = (Ref(gradient),), {"dtype": dtype}
        self.backward.append(
            KernelLine((cast,), "aten._to_copy.default", args, kwargs, line.parameter)
        )
        self.gradient_metas[cast.name] = meta._replace(dtype=dtype)
        return cast.name

    def _storage_moves(self, line: GatherLine, gradient: str) -> list[GradientMove]:
        """The moves of one parameter's gradient on its way to storage."""
        inputs = [self.locals[line.source], *(move.out for move in line.moves[:-1])]
        members: list[GradientMove] = []
        for local, move in zip(reversed(inputs), reversed(line.moves), strict=True):
            if move.move.backward == "identity":
                continue
            out = self._reduced(line, local, gradient)
            members.append(GradientMove(out, gradient, move))
            meta = self._reduced_meta(members[-1])
            gradient, self.gradient_metas[out.name] = out.name, meta
        return members

    def _reduced(self, line: GatherLine, local: Local, gradient: str) -> Variable:
        """A new variable for the gradient of `local`, one step on the way to storage."""
        name, dtype = self.names.new(f"grad_{line.source}"), self.gradient_metas[gradient].dtype
        return Variable(name, local.shape, dtype, gradient_spec(local.spec))

    def _reduced_meta(self, member: GradientMove) -> Meta:
        before = self.gradient_metas[member.source]
        return contiguous_meta(before._replace(shape=member.out.shape))

    def _operator(self, work: Backward, line: CallLine, given: Sequence[str | None]) -> None:
        i = work.position
        call, inputs = self.calls[i]
        metas = [None if name is None else self.gradient_metas[name] for name in given]
        found = template(call, metas)
        if found is None:
            self._function(work, line, given)
            return
        made = found.recording
        line = self._forward_of(i, line, found, inputs)
        variables = dict(enumerate(inputs)) | self.kept[i]
        for slot, out in zip(made.outs, line.outs, strict=True):
            if slot is not None and slot not in variables:
                variables[slot] = out.name
        for slot, name in zip(made.cotangents, given, strict=True):
            if slot is not None and name is not None:
                variables[slot] = name
        printer = KernelPrinter(line, self.names, f"grad_{_stem(line)}", made.metas, variables)
        last = {}
        for name, slot in zip(inputs, made.gradients, strict=True):
            if slot is not None and slot not in variables and slot not in last:
                last[slot] = self._gradient_variable(name)
        lines = [*self.copies.get(i, ())] if i in self.kept_lines else []
        lines += printer.lines(found.again, {}, found.read | last.keys())
        lines += printer.lines(made.backward, last, found.read)
        gradients = [
            _Made(name, printer.variables[slot], made.metas[slot])
            for name, slot in zip(inputs, made.gradients, strict=True)
            if slot is not None
        ]
        self._make(work, lines, gradients)

    def _forward_of(
        self, i: int, line: CallLine, found: Template, inputs: Sequence[str]
    ) -> CallLine:
        """Write the forward of an operator; returns its line, whose read results have names."""
        made = found.recording
        outs = []
        for out, slot in zip(line.outs, made.outs, strict=True):
            if out.name == UNUSED and slot is not None and slot in found.read:
                out = replace(out, name=self.names.new(f"{_stem(line)}_kept"))
            outs.append(out)
        if any(own is not out for own, out in zip(outs, line.outs, strict=True)):
            line = replace(line, outs=tuple(outs))
        self.kept[i] = {}
        if found.forward is None:
            self.forward[i] = [line]
            return line
        printer = KernelPrinter(
            line, self.names, _stem(line), made.metas, dict(enumerate(inputs)), True
        )  # fmt: skip
        known = {
            slot: Variable(out.name, out.shape, out.dtype, out.spec)
            for slot, out in zip(made.outs, outs, strict=True)
            if slot is not None and slot >= len(inputs) and out.name != UNUSED
        }
        lines = printer.lines(found.forward, known, found.read_ahead)
        self.forward[i] = [*lines]
        self.copies[i] = [
            line
            for line, kernel in zip(lines, found.forward, strict=True)
            if found.copies.issuperset(slot for slot in kernel.outs if slot is not None)
        ]
        self.kept[i] = {slot: printer.variables[slot] for slot in found.kept}
        return line

    def _function(self, work: Backward, line: CallLine, given: Sequence[str | None]) -> None:
        kept = self.names.new(f"{_stem(line)}_kept")
        names = [name for name in line.reads if name in self.metas]
        differentiable = tuple(self.metas[name].has_grad for name in names)
        self.forward[work.position] = [FunctionLine(line, kept, differentiable)]
        unused = Variable(UNUSED, (), torch.float32)
        outs = [self._gradient_variable(n) if self.metas[n].has_grad else unused for n in names]
        keeps = LOWERED[line.lowered].keeps if line.lowered else ()
        taken = (line.args[k] for k in keeps)
        inputs = tuple(arg.name if isinstance(arg, Ref) else None for arg in taken)
        backward = FunctionBackward(tuple(outs), line, kept, inputs, tuple(given))
        gradients = [
            _Made(name, out.name, contiguous_meta(self.metas[name]))
            for name, out in zip(names, outs, strict=True)
            if out.name != UNUSED
        ]
        self._make(work, [backward], gradients)

    def _gradient_variable(self, name: str) -> Variable:
        """A new variable for a gradient of `name`."""
        local, new = self.locals[name], self.names.new(f"grad_{name}")
        return Variable(new, local.shape, local.dtype, gradient_spec(local.spec))

    def _add(self, name: str, gradient: str, meta: Meta) -> None:
        """Add a gradient to that of a variable, in the order of arrival."""
        if not self.metas[name].has_grad:
            return
        self.gradient_metas[gradient] = meta._replace(has_grad=False)
        known = self.gradients.get(name)
        if known is None:
            self.gradients[name] = gradient
            return
        total = self._gradient_variable(name)
        args = Ref(known), Ref(gradient)
        self.backward.append(KernelLine((total,), "aten.add.Tensor", args, {}, ""))
        self.gradients[name] = total.name
        summed = sum_meta(self.gradient_metas[known], meta)
        if summed.stride != self.gradient_metas[known].stride:
            self.moved.add(total.name)
        self.gradient_metas[total.name] = summed._replace(is_conj=False)


def _divided(
    lines: Sequence[JointLine], names: Collection[str]
) -> tuple[list[JointLine], list[JointLine]]:
    """The lines that make variables, with what these need, and the others; both in order."""
    needed, first, later = {*names}, list[JointLine](), list[JointLine]()
    for line in reversed(lines):
        if needed.isdisjoint(line.writes):
            later.append(line)
        else:
            first.append(line)
            needed.update(line.reads)
    return first[::-1], later[::-1]


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _stem(line: CallLine) -> str:
    """What new variables of an operator are named after: its first result that has a name."""
    return next((out.name for out in line.outs if out.name != UNUSED), "unused")


def _handle(line: Communication) -> str:
    return f"{line.writes[0]}_coming"
