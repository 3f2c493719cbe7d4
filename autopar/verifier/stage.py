"""Verifies one stage program before it runs (`verify_program`). Its invariants:

    variables    a variable is defined before it is read
    types        a variable's shape is the local shape that its factors and spec give
    reshards     a move makes the change of placement that its name says, on its axes only; axes
                 that leave a factor were innermost on it; axes that join a factor become
                 innermost on it; the cuts (dim, outer) and the bytes agree     (`check_move`)
    operators    on each axis, either all inputs and outputs with gradient are Invariant, or none
    parameters   the moves of every use lead from the stored spec to the spec in use
    segments     lines that run again are in a range of the body, of which backward needs the last
                 one, and have only moves of the forward phase
    loss         Invariant on every axis, so that backward starts with 1 on every rank

No line has a condition on the rank, and the groups along some axes part the ranks. So all ranks
make the same calls in the same order, and none waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import VerificationError
from autopar.placement import (
    TABLE,
    Move,
    Placement,
    Spec,
    Split,
    TensorType,
    folds_of,
    illegal_reason,
    local_bytes,
    local_dims,
)
from autopar.program.lines import (
    DEVICE,
    UNUSED,
    CallLine,
    DetachLine,
    GatherLine,
    Line,
    Local,
    MoveLine,
    Segment,
    StageProgram,
    StoredParameter,
    reserved_names,
)


def verify_program(program: StageProgram) -> None:
    """Raise `VerificationError`, naming the line and the reason, unless all invariants hold."""
    _Checker(program).run()


@dataclass
class _Checker:
    """Checks the lines in order; `known` are the variables that may be read."""

    program: StageProgram
    known: dict[str, Local] = field(default_factory=dict)
    # Types and moves that passed are not checked again: repeated blocks have equal ones.
    sound_types: set[tuple[object, ...]] = field(default_factory=set)
    sound_moves: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sizes = self.program.axis_sizes
        self.axes = range(len(self.sizes))
        self.words = words_of(self.program)
        self.parameters = {p.name: p for p in self.program.parameters}
        self.folded = self.program.folded

    def run(self) -> None:
        if len(self.program.axis_names) != len(self.sizes):
            raise _error(f"{len(self.program.axis_names)} axis names for {self.sizes}", "the mesh")
        for parameter in self.program.parameters:
            self._parameter(parameter)
        for item in self.program.delivered:
            where = f"delivered {item.source}"
            self._type(item.local, where)
            self._define(item.local, where)
        for boundary in self.program.received:
            where = f"received {boundary.key}"
            self._type(boundary.local, where)
            self._crosses(boundary.local, "P", where)
            self._define(boundary.local, where)
        starts = {s.start: s for s in self.program.segments}
        self._order()
        for number, line in enumerate(self.program.body):
            if number in starts:
                self._segment(starts[number])
            self._line(line, f"line {number}: {describe(line)}")
        self._results()

    def _define(self, local: Local, where: str) -> None:
        if local.name == UNUSED:
            return
        if local.name in self.known or local.name in self.words:
            raise _error(f"{local.name} is defined twice", where)
        self.known[local.name] = local

    def _read(self, name: str, where: str) -> Local:
        if name not in self.known:
            raise _error(f"{name} is read before it is defined", where)
        return self.known[name]

    def _type(self, local: Local, where: str) -> None:
        key = local.dims, local.dtype, local.has_grad, local.spec, local.shape, local.folded
        if key in self.sound_types:
            return
        tensor = local.tensor
        reason = illegal_reason(tensor, local.spec, self.sizes)
        if reason is not None:
            raise _error(f"{local.name} cannot be {local.spec}: {reason}", where)
        expected = tuple(math.prod(d) for d in local_dims(tensor, local.spec, self.sizes))
        if local.shape != expected:
            raise _error(
                f"{local.name} has local shape {list(local.shape)}, but {local.spec} of "
                f"{list(tensor.shape)} leaves {list(expected)}",
                where,
            )
        if local.folded is not None:
            if local.folded not in self.axes or local.folded != self.folded:
                raise _error(f"{local.name} is in head-tail order on axis {local.folded}", where)
            if folds_of(local.dims, local.spec, local.folded, self.sizes) == 1:
                raise _error(f"{local.name} cannot be in head-tail order at {local.spec}", where)
        self.sound_types.add(key)

    def _line(self, line: Line, where: str) -> None:
        match line:
            case MoveLine():
                self._move(line, self._read(line.source, where), where)
                if line.out.name == line.source:
                    self.known[line.out.name] = line.out
                else:
                    self._define(line.out, where)
            case DetachLine():
                source = self._read(line.source, where)
                self._type(line.out, where)
                found = (line.out.shape, line.out.dtype, line.out.has_grad)
                if found != (source.shape, source.dtype, False):
                    raise _error(f"{line.out.name} is not the tensor that was detached", where)
                self._define(line.out, where)
            case GatherLine():
                self._gather(line, where)
            case CallLine():
                self._call(line, where)

    def _order(self) -> None:
        """Raise unless the segments are ranges of the body that follow each other."""
        end = 0
        for s in self.program.segments:
            if not end <= s.start < s.stop <= len(self.program.body):
                raise _error(f"lines {s.start} to {s.stop} are no range of the body", s.name)
            end = s.stop

    def _segment(self, segment: Segment) -> None:
        """Raise unless the lines that run again may do so, before one that has a backward."""
        body, where = self.program.body, f"segment {segment.name}"
        if not set(segment.again) <= set(range(segment.start, segment.stop)):
            raise _error(f"of lines {sorted(segment.again)} some are outside of it", where)
        for line in (body[i] for i in segment.again):
            if isinstance(line, DetachLine) or (
                isinstance(line, MoveLine) and line.phase != "forward"
            ):
                raise _error(f"{describe(line)} cannot run again", where)
        last = body[segment.last]
        if not isinstance(last, CallLine) or segment.last not in self.program.differentiated:
            raise _error("backward needs nothing of its last line", where)

    def _call(self, line: CallLine, where: str) -> None:
        inputs = [self._read(name, where) for name in line.reads if name not in self.words]
        for name in (*line.keeps, *(s for s in line.shares if s is not None)):
            if name not in (*line.reads, *(out.name for out in line.outs)):
                raise _error(f"{name} is neither read nor written here", where)
        if line.shares and len(line.shares) != len(line.outs):
            raise _error(f"{len(line.shares)} shares for {len(line.outs)} results", where)
        for out in line.outs:
            self._type(out, where)
            self._define(out, where)
        self._one_order((*inputs, *line.outs), where)
        for axis in self.axes:
            if self.sizes[axis] > 1 and axis not in line.lowered_axes:
                self._one_kind(inputs, line.outs, axis, where)
        if any(axis not in self.axes or self.sizes[axis] == 1 for axis in line.lowered_axes):
            raise _error(f"there is no group over axes {line.lowered_axes}", where)

    def _one_order(self, locals_: Sequence[Local], where: str) -> None:
        """Raise unless all sequences of an operator are in one order on the folded axis."""
        axis = self.folded
        if axis is None:
            return
        sequences = [x for x in locals_ if x.factor_kinds and x.shard_kind(axis) == "sequence"]
        if len({x.folded for x in sequences}) > 1:
            names = ", ".join(x.name for x in sequences)
            raise _error(f"of {names} only some are in head-tail order", where)

    def _one_kind(
        self, inputs: Sequence[Local], results: Sequence[Local], axis: int, where: str
    ) -> None:
        """Raise unless all inputs and results with gradient are Invariant on the axis, or none.

        If they are Invariant, no input may differ between ranks (S or P).
        """
        placed = [
            (local.name, local.spec.placements[axis])
            for local in (*inputs, *results)
            if local.has_grad
        ]
        invariant = [name for name, p in placed if p.kind == "I"]
        others = [(name, p) for name, p in placed if p.kind != "I"]
        if invariant and others:
            name, placement = others[0]
            raise _error(
                f"{invariant[0]} is I and {name} is {placement} on axis "
                f"{self.program.axis_names[axis]}; the gradients would be wrong",
                where,
            )
        if invariant and any(i.spec.placements[axis].kind in ("S", "P") for i in inputs):
            raise _error(f"{invariant[0]} is I, but an input differs between ranks", where)

    def _move(self, line: MoveLine, source: Local, where: str) -> None:
        self._type(line.out, where)
        same = (source.dims, source.dtype, source.has_grad, source.gradient_dtype)
        out = line.out
        if (out.dims, out.dtype, out.has_grad, out.gradient_dtype) != same:
            raise _error(f"{line.out.name} and {source.name} are not one tensor", where)
        if line.has_grad != source.has_grad:
            raise _error(f"has_grad is {line.has_grad}, but {source.name}'s is not", where)
        found = line.forward_bytes, line.backward_bytes
        folds = tuple(folds_over(local, line.move.axes, self.sizes) for local in (source, out))
        key = *same, source.spec, line.move, line.out.spec, found, folds
        if key in self.sound_moves:
            return
        tensor = source.tensor
        reason = check_move(tensor, source.spec, line.move, line.out.spec, self.sizes, folds)
        if reason is not None:
            raise _error(reason, where)
        before, after = (local_bytes(tensor, s, self.sizes) for s in (source.spec, line.out.spec))
        forward = after if line.move.forward == "all_gather" else before
        backward = before if line.move.backward == "all_gather" else after
        backward = tensor.gradient_bytes(backward)
        expected = (forward, backward if line.has_grad else 0)
        if found != expected:
            raise _error(f"moves {found} bytes (forward, backward), not {expected}", where)
        self.sound_moves.add(key)

    def _chain(self, start: Local, moves: Sequence[MoveLine], end: Local, where: str) -> None:
        """Raise unless `moves` lead from `start` to `end`."""
        at = start
        for move in moves:
            if move.source != at.name:
                raise _error(f"{move.move.name} starts from {move.source}, not {at.name}", where)
            self._move(move, at, where)
            at = move.out
        if (at.spec, at.shape) != (end.spec, end.shape):
            raise _error(f"its moves lead to {at.spec}, but {end.name} is {end.spec}", where)
        if at.name != end.name:
            raise _error(f"its moves lead to {at.name}, not {end.name}", where)

    def _gather(self, line: GatherLine, where: str) -> None:
        owner = self.parameters.get(line.parameter)
        if owner is None or owner.period != "use" or owner.shard.name != line.source:
            raise _error(f"{line.parameter} is not gathered for each use", where)
        self._type(line.out, where)
        self._chain(self._read(line.source, where), line.moves, line.out, where)
        self._define(line.out, where)

    def _parameter(self, parameter: StoredParameter) -> None:
        where = f"parameter {parameter.name}"
        stored = parameter.stored
        self._type(stored, where)
        for axis, placement in enumerate(stored.spec.placements):
            # Without gradient, I and R are equivalent.
            if placement.kind not in ("I", "S") and (stored.has_grad or placement.kind != "R"):
                name = self.program.axis_names[axis]
                raise _error(f"stored {placement} on axis {name}; only I and S can be", where)
        if stored.dims != parameter.dims or stored.has_grad != parameter.requires_grad:
            raise _error("its storage is another tensor", where)
        shard = parameter.shard
        if parameter.cast is not None:
            self._type(shard, where)
            found = replace(stored, dtype=shard.dtype, gradient_dtype=shard.gradient_dtype)
            if found != shard or stored.dtype == shard.dtype:
                raise _error("its cast is another tensor, or none", where)
        if parameter.period == "use":
            if parameter.uses:
                raise _error("gathered at each use, but converted once a step too", where)
            self._define(shard, where)
        for use in parameter.uses:
            self._type(use.local, where)
            # Without moves, the use is the stored tensor under another name.
            start = shard if use.moves else replace(shard, name=use.local.name)
            self._chain(start, use.moves, use.local, where)
            self._define(use.local, where)

    def _results(self) -> None:
        loss = self.program.loss
        if loss is not None:
            local = self._read(loss, "the loss")
            if local.shape != ():
                raise _error(f"{loss} has shape {list(local.shape)}", "the loss")
            for axis, placement in self._active(local.spec):
                # Without gradient, I and R are equivalent.
                if placement.kind != "I" and (local.has_grad or placement.kind != "R"):
                    name = self.program.axis_names[axis]
                    raise _error(f"{loss} ends {placement} on axis {name}, not I", "the loss")
        for boundary in self.program.sent:
            where = f"sent {boundary.key}"
            local = self._read(boundary.local.name, where)
            if local != boundary.local:
                raise _error(f"{local.name} is {local.spec}, not {boundary.local.spec}", where)
            self._crosses(local, "R", where)
        for name in self.program.outputs:
            self._is_whole(self._read(name, "the outputs"), "the outputs")
        for buffer in self.program.changed:
            where = f"buffer {buffer.name}"
            local = self._read(buffer.local.name, where)
            if local != buffer.local:
                raise _error(f"{local.name} is {local.spec}, not {buffer.local.spec}", where)
            self._is_whole(local, where)

    def _is_whole(self, local: Local, where: str) -> None:
        for axis, placement in self._active(local.spec):
            if placement.kind not in ("I", "R"):
                name = self.program.axis_names[axis]
                raise _error(f"{local.name} ends {placement} on axis {name}, not whole", where)

    def _crosses(self, local: Local, rest: str, where: str) -> None:
        """Raise unless the tensor is sharded on each axis, or `rest`.

        `rest` is the placement on an axis along which only one rank takes part
        (`program/communication/cross_mesh.py`).
        """
        for axis, placement in self._active(local.spec):
            if not placement.is_shard and placement.kind != rest:
                name = self.program.axis_names[axis]
                raise _error(f"{local.name} crosses {placement} on axis {name}", where)

    def _active(self, spec: Spec) -> Iterator[tuple[int, Placement]]:
        return ((a, p) for a, p in enumerate(spec.placements) if self.sizes[a] > 1)


def words_of(program: StageProgram) -> frozenset[str]:
    """Names in a generated function that are no variables: groups, the device, words of Python."""
    return reserved_names(program.axis_names) | {DEVICE.name}


def folds_over(local: Local, axes: Sequence[int], sizes: Sequence[int]) -> int:
    """`Split.folds` of a variable's shard over axes."""
    return sizes[local.folded] if local.folded is not None and local.folded in axes else 1


def check_move(
    tensor: TensorType, source: Spec, move: Move, target: Spec, sizes: Sequence[int],
    folds: Sequence[int] = (1, 1),
) -> str | None:  # fmt: skip
    """Why `move` does not turn `source` into `target`; None if it does.

    `folds` are those of their shards over the axes of the move.
    """
    if move.name not in TABLE:
        return f"there is no move {move.name}"
    axes = move.axes
    if not axes or list(axes) != sorted(set(axes)):
        return f"axes {axes} are no group: they must be distinct and ascending"
    if any(a not in range(len(sizes)) or sizes[a] == 1 for a in axes):
        return f"axes {axes} are not all axes of more than one rank"
    before, after = move.name.upper().split("_TO_")
    for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
        if axis not in axes and old != new:
            return f"{move.name} over axes {axes} changes axis {axis} from {old} to {new}"
        if axis in axes and (old.kind, new.kind) != (before, after):
            return f"{move.name} is no move from {old} to {new} on axis {axis}"
    old, new = source.placements[axes[0]], target.placements[axes[0]]
    if any(source.placements[a] != old or target.placements[a] != new for a in axes):
        return f"axes {axes} are placed differently: from {source} to {target}"
    if old == new:
        return f"{move.name} from {old} to {new} changes nothing"
    if old.is_shard and source.axes_of(old.cell)[-len(axes) :] != axes:
        return f"axes {axes} are not innermost on {old}: an inner axis still splits it"
    for cell in tensor.cells:
        holders = tuple(a for a in source.axes_of(cell) if a not in axes)
        expected = (*holders, *axes) if new.is_shard and cell == new.cell else holders
        if target.axes_of(cell) != expected:
            return f"S{cell} is split by axes {target.axes_of(cell)}, not {expected} in this order"
    splits = _splits(tensor, source, axes, old, new, sizes, folds)
    if move.splits != splits:
        return f"{move.name} cuts {_shown(move.splits)}, not {_shown(splits)}"
    return None


def _splits(
    tensor: TensorType,
    source: Spec,
    axes: Sequence[int],
    old: Placement,
    new: Placement,
    sizes: Sequence[int],
    folds: Sequence[int],
) -> tuple[Split, ...]:
    """The cuts of a move, by the definition of `placement.Move`."""

    def outer(dims: Sequence[Sequence[int]], placement: Placement) -> Split:
        size = math.prod(dims[placement.dim][: placement.factor])
        return Split(placement.dim, size, folds[0 if placement == old else 1])

    dims = [list(factors) for factors in local_dims(tensor, source, sizes)]
    if not (old.is_shard and new.is_shard):
        return tuple(outer(dims, p) for p in (old, new) if p.is_shard)
    taken = outer(dims, new)
    dims[new.dim][new.factor] //= math.prod(sizes[a] for a in axes)
    return outer(dims, old), taken


def _shown(splits: Sequence[Split]) -> str:
    words = (f"dim {s.dim} outer {s.outer}{f' folds {s.folds}' * (s.folds > 1)}" for s in splits)
    return " then ".join(words) or "nothing"


def describe(line: Line) -> str:
    """A line in short, for error messages."""
    match line:
        case MoveLine():
            return f"{line.out.name} = {line.move.name}({line.source})"
        case GatherLine():
            return f"{line.out.name} = gathered({line.source})"
        case DetachLine():
            return f"{line.out.name} = {line.source}.detach()"
        case CallLine():
            outs = ", ".join(out.name for out in line.outs)
            place = f" at {line.where}" if line.where else ""
            return f"{outs} = {line.lowered or line.target}({', '.join(line.reads)}){place}"


def _error(reason: str, where: str) -> VerificationError:
    return VerificationError(
        reason, where=where, hint="this is a bug of autopar, or the program was edited; plan again"
    )
