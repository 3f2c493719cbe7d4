"""Prints one line of a joint program as a statement, with its comment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.codegen.words import (
    assigned,
    call_words,
    commented,
    inner_calls,
    name_rows,
    traffic,
    tuple_text,
    type_text,
)
from autopar.placement import Move, Split
from autopar.program.lines import (
    UNUSED,
    CallLine,
    DetachLine,
    FreeLine,
    FunctionBackward,
    FunctionLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    KernelLine,
    LossAtEnd,
    MoveLine,
    ReadyLine,
    StageProgram,
    StartLine,
    Variable,
    WaitLine,
    WeightGradients,
    free_name,
    group_name,
)
from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Statements:
    """The statements of lines.

    taken    the variables whose gradients backward hands over
    names    the variables and groups of the file, which no operator may be called
    handles  the globals of operators that were asked for
    """

    axis_names: tuple[str, ...]
    taken: tuple[str, ...]
    names: frozenset[str]
    handles: dict[str, str] = field(default_factory=dict, compare=False)

    def lines(self, line: JointLine, is_backward: bool) -> list[str]:
        """The statement, as lines of a function's body."""
        name, indent = phase_of(line), " " * 4
        out: list[str] = []
        if name not in ("", "backward" if is_backward else "forward"):
            out, indent = [f'    with phase("{name}"):'], " " * 8
        for text, comment in self._rows(line):
            out.append(commented(f"{indent}{text}", comment) if comment else f"{indent}{text}")
        return out

    def _rows(self, line: JointLine) -> list[tuple[str, str]]:
        """The rows of a statement, each with its comment."""
        match line:
            case KernelLine() | FreeLine() | CallLine():
                return [self._text(line)]
            case LossAtEnd() | WeightGradients():
                return []
            case FusedGathers() | FusedReductions():
                (first, comment), *more = self._fused(line, "together")
                return [*_names_of(line), (f") = {first}", comment), *more]
            case StartLine(move=FusedGathers() | FusedReductions() as fused):
                (first, comment), *more = self._fused(fused, "start_together")
                return [(f"{line.pending} = {first}", comment), *more]
            case WaitLine(move=FusedGathers() | FusedReductions() as fused):
                return [*_names_of(fused), (f") = {line.pending}.wait()", "")]
        return [self._text(line)]

    def _fused(self, line: FusedGathers | FusedReductions, method: str) -> list[tuple[str, str]]:
        """The call that several gathers, or reductions of gradients, share."""
        (move, *_), own = moves_of(line), [_splits_of(member) for member in line.members]
        words = [self._group(move), f"dims=[{', '.join(str(split.dim) for split in own)}]"]
        if any(split.outer != 1 for split in own):
            words.append(f"outers=[{', '.join(str(split.outer) for split in own)}]")
        names = name_rows([member.source for member in line.members], 8)
        return [
            (f"{move.name}.{method}(", _fused_traffic(line)),
            ("    [", ""),
            *((row, "") for row in names),
            ("    ],", ""),
            (f"    {', '.join(words)},", ""),
            (")", ""),
        ]

    def _text(self, line: JointLine) -> tuple[str, str]:
        """A line, and its comment."""
        match line:
            case KernelLine():
                names = assigned([out.name for out in line.outs], line.target)
                call = f"{self.operator_handle(line.target)}({call_words(line.args, line.kwargs)})"
                return f"{names} = {call}", _types(line.outs)
            case FreeLine():
                return f"del {', '.join(line.names)}", ""
            case CallLine():
                return self._call(line)
            case FunctionLine():
                text, comment = self._call(line.call)
                names, _, call = text.partition(" = ")
                _, _, words = call.partition("(")
                many = f"({names})" if "," in names else names
                return (
                    f"{many}, {line.kept} = {self.function_handle(line)}.forward({words}",
                    comment,
                )
            case FunctionBackward():
                names = ", ".join(out.name for out in line.outs)
                words = ", ".join(
                    [
                        line.kept,
                        tuple_text(line.inputs),
                        tuple_text(line.gradients),
                        str(line.wanted),
                    ]
                )
                comma = "," if len(line.outs) == 1 else ""
                types = _types(line.outs)
                inner = inner_calls(line.call, "backward")
                comment = f"{types}  {inner}" if inner else types
                return f"{names}{comma} = {self.function_handle(line)}.backward({words})", comment
            case MoveLine() | GradientMove():
                text = f"{line.out.name} = {self._move(moves_of(line)[0], line.source)}"
                return text, f"{type_text(line.out)}  {_traffic_text(line)}"
            case DetachLine():
                return f"{line.out.name} = {line.source}.detach()", type_text(line.out)
            case GatherLine():
                chain = line.source
                for move in line.moves:
                    chain = self._move(move.move, chain)
                return f"{line.out.name} = {chain}", f"{type_text(line.out)}  {_traffic_text(line)}"
            case StartLine(move=MoveLine() | GatherLine() | GradientMove() as begun):
                (begins,) = moves_of(begun)
                text = self._move(begins, begun.source, ".start")
                return f"{line.pending} = {text}", _traffic_text(begun)
            case WaitLine(move=MoveLine() | GatherLine() | GradientMove() as begun):
                return f"{begun.out.name} = {line.pending}.wait()", type_text(begun.out)
            case ReadyLine():
                given = f"{line.source}.clone()" if line.is_shared else line.source
                return f"ready({line.position}, {given})", f"of {self.taken[line.position]}"
        raise AssertionError(f"{type(line).__name__} has rows of its own")

    def _call(self, line: CallLine) -> tuple[str, str]:
        names = assigned([out.name for out in line.outs], line.target)
        function = line.lowered or self.operator_handle(line.target)
        types = ", ".join(dict.fromkeys(type_text(out) for out in line.outs))
        inner = inner_calls(line, "forward")
        comment = f"{types}  {inner}" if inner else types
        return f"{names} = {function}({call_words(line.args, line.kwargs)})", comment

    def _move(self, move: Move, source: str, method: str = "") -> str:
        group = self._group(move)
        if len(move.splits) == 2:
            (a, b) = move.splits
            return f"{move.name}{method}({source}, {group}, source={_cut(a)}, target={_cut(b)})"
        words = [source, group]
        for split in move.splits:
            words.append(f"dim={split.dim}")
            if split.outer != 1:
                words.append(f"outer={split.outer}")
            if split.folds != 1:
                words.append(f"folds={split.folds}")
        return f"{move.name}{method}({', '.join(words)})"

    def _group(self, move: Move) -> str:
        return group_name(self.axis_names, move.axes)

    def operator_handle(self, target: str) -> str:
        """The global that holds an operator: `aten.add.Tensor` -> `aten_add_Tensor`."""
        if target not in self.handles:
            self.handles[target] = free_name(_handle(target), self.names)
        return self.handles[target]

    def function_handle(self, line: FunctionLine | FunctionBackward) -> str:
        """The global that holds a function with its backward.

        Taped calls of one operator differ in which arguments have a gradient.
        """
        if line.call.lowered:
            return line.call.lowered
        flags = line.differentiable if isinstance(line, FunctionLine) else line.wanted
        taped = f"{_handle(line.call.target)}_taped_{''.join(str(int(flag)) for flag in flags)}"
        return free_name(taped, self.names)


def _cut(split: Split) -> str:
    """A split as (dim, outer) or (dim, outer, folds)."""
    folds = f", {split.folds}" if split.folds > 1 else ""
    return f"({split.dim}, {split.outer}{folds})"


def _types(outs: Iterable[Variable]) -> str:
    """The types of results, each once."""
    return ", ".join(dict.fromkeys(type_text(out) for out in outs if out.name != UNUSED))


def _names_of(line: FusedGathers | FusedReductions) -> list[tuple[str, str]]:
    """The results of a fused call, as the left side of an assignment."""
    named = ((f"    {member.out.name},", type_text(member.out)) for member in line.members)
    return [("(", ""), *named]


def _traffic_text(line: MoveLine | GatherLine | GradientMove) -> str:
    """What a line moves, by which primitives."""
    if isinstance(line, GradientMove):
        return traffic(line.move, "backward")
    moves = line.moves if isinstance(line, GatherLine) else (line,)
    return " then ".join(traffic(move, "forward") for move in moves)


def _splits_of(member: GatherLine | GradientMove) -> Split:
    (split,) = moves_of(member)[0].splits
    return split


def _fused_traffic(line: FusedGathers | FusedReductions) -> str:
    """What a fused call moves; its members have their shares of its seconds."""
    if isinstance(line, FusedGathers):
        lines = [member.moves[0] for member in line.members]
        kind, size_bytes = lines[0].move.forward, sum(x.forward_bytes for x in lines)
        time_s = sum(x.forward_s for x in lines)
    else:
        lines = [member.move for member in line.members]
        kind, size_bytes = lines[0].move.backward, sum(x.backward_bytes for x in lines)
        time_s = sum(x.backward_s for x in lines)
    return f"{kind} {format_bytes(size_bytes)} {format_seconds(time_s)}"


def _handle(target: str) -> str:
    return target.removesuffix(".default").replace(".", "_")


def phase_of(line: JointLine) -> str:
    """The phase that a line's collectives belong to; empty for that of the function."""
    match line:
        case KernelLine() | FreeLine() | MoveLine(phase="forward"):
            return ""
        case MoveLine() | GradientMove():
            return line.phase
        case StartLine():
            return phase_of(line.move)
        case GatherLine() | FusedGathers():
            return "param_gather"
        case FusedReductions():
            return "grad_sync"
        case _:
            return ""


def moves_of(line: JointLine) -> list[Move]:
    """The moves that a line calls."""
    match line:
        case KernelLine() | FreeLine():
            return []
        case MoveLine():
            return [line.move]
        case GatherLine():
            return [move.move for move in line.moves]
        case GradientMove():
            return [line.move.move.transposed]
        case FusedGathers() | FusedReductions():
            return moves_of(line.members[0])
        case StartLine():
            return moves_of(line.move)
        case _:
            return []


def prologue_rows(program: StageProgram) -> list[str]:
    """The function that computes the divisors, which depend on the whole batch's inputs only."""
    inputs = ", ".join(program.prologue_inputs)
    out = [
        f"def prologue({inputs}):",
        '    """Once a step, on the rows this rank was given; the values add up over rows."""',
    ]
    for name, expression in program.prologue:
        if name == "return":
            out.append(f"    return ({expression})")
        else:
            out.append(f"    {name} = {expression}")
    return out


def line_blocks(program: StageProgram) -> dict[str, str | None]:
    """The block of each operator, by its key; of each move of a gather or an activation, by what it
    makes; of each gathered parameter, by its name.

    An activation is moved by the block that made it, if it moves before the block ends.
    """
    found: dict[str, str | None] = {}
    made: dict[str, str | None] = {}
    moves: list[MoveLine] = []
    for line in program.body:
        match line:
            case MoveLine():
                moves.append(line)
            case GatherLine():
                found[line.parameter] = line.block
                found |= {move.out.name: line.block for move in line.moves}
            case CallLine():
                for move in moves:
                    own = made.get(move.source) == line.block
                    found[move.out.name] = made[move.out.name] = line.block if own else None
                moves.clear()
                found[line.key] = line.block
                made |= dict.fromkeys(line.writes, line.block)
    return found


def section_of(module: str, block: str | None) -> str:
    """A module as far as it stands apart: a child of a block with all in it.

    Words of the comment may be before its path.
    """
    start, mark, child = module.partition(f"{block}.")
    return start + mark + child.partition(".")[0]


def is_view(line: JointLine) -> bool:
    """Does a line only view what it reads?"""
    if isinstance(line, CallLine):
        return line.lowered is None and len(line.outs) == 1 and line.shares[:1] not in ((), (None,))
    return isinstance(line, KernelLine) and line.is_view and len(line.outs) == 1
