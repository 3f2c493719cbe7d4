"""Mutants of a joint program: one edit each, none of which leaves the program as it was.

A mutant that does the same as the program is none: two lines that have nothing to do with each
other may change places, and a gradient may be copied without need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.placement import I, P, R, Spec
from autopar.program.lines import (
    CallLine,
    FreeLine,
    FunctionBackward,
    FunctionLine,
    FusedGathers,
    FusedReductions,
    GatherLine,
    GradientMove,
    JointLine,
    JointProgram,
    KernelLine,
    LossAtEnd,
    MoveLine,
    ReadyLine,
    Ref,
    StartLine,
    Variable,
    WaitLine,
    communications,
)

Mutants = Iterator[tuple[str, JointProgram]]
FUNCTIONS = ("forward", "backward")


def lines_of(joint: JointProgram, function: str) -> tuple[JointLine, ...]:
    lines: tuple[JointLine, ...] = getattr(joint, function)
    return lines


def edited(joint: JointProgram, function: str, lines: Sequence[JointLine]) -> JointProgram:
    changes: dict[str, Any] = {function: tuple(lines)}
    return replace(joint, **changes)


def with_line(joint: JointProgram, function: str, at: int, *new: JointLine) -> JointProgram:
    """The program with the line at `at` replaced."""
    lines = lines_of(joint, function)
    return edited(joint, function, (*lines[:at], *new, *lines[at + 1 :]))


def numbered(joint: JointProgram) -> Iterator[tuple[str, int, JointLine]]:
    for function in FUNCTIONS:
        for i, line in enumerate(lines_of(joint, function)):
            yield function, i, line


def dropped(joint: JointProgram) -> Mutants:
    for function, i, line in numbered(joint):
        if not isinstance(line, LossAtEnd):  # without it forward waits for the loss, as it may
            yield f"drop {function} {i} {line}", with_line(joint, function, i)


def duplicated(joint: JointProgram) -> Mutants:
    for function, i, line in numbered(joint):
        yield f"twice {function} {i} {line}", with_line(joint, function, i, line, line)


def swapped(joint: JointProgram) -> Mutants:
    """Neighbours that depend on each other."""
    for function in FUNCTIONS:
        lines = lines_of(joint, function)
        for i, (a, b) in enumerate(itertools.pairwise(lines)):
            if _depend(a, b):
                mutant = edited(joint, function, (*lines[:i], b, a, *lines[i + 2 :]))
                yield f"swap {function} {i} {a} {b}", mutant


def freed_early(joint: JointProgram) -> Mutants:
    """A variable before its last read."""
    for function, i, line in numbered(joint):
        for name in _freed(line):
            lines = list(lines_of(joint, function))
            last = max((k for k in range(i) if name in lines[k].reads), default=None)
            if last is not None:
                lines[i] = FreeLine(tuple(n for n in _freed(line) if n != name))
                lines.insert(last, FreeLine((name,)))
                yield f"early {function} {name}", edited(joint, function, lines)


def leaked(joint: JointProgram) -> Mutants:
    for function, i, line in numbered(joint):
        for name in _freed(line):
            fewer = FreeLine(tuple(n for n in _freed(line) if n != name))
            yield f"leak {function} {name}", with_line(joint, function, i, fewer)


def saved_otherwise(joint: JointProgram) -> Mutants:
    for name in joint.saved:
        yield f"unsaved {name}", replace(joint, saved=tuple(n for n in joint.saved if n != name))
    for function, i, line in numbered(joint):
        if function == "forward" and isinstance(line, FreeLine):
            yield f"saved {i}", replace(joint, saved=(*joint.saved, line.names[0]))


def moved_otherwise(joint: JointProgram) -> Mutants:
    """Moves of gradients over other axes, in the other direction, or to other types."""
    for i, line in enumerate(joint.backward):
        if isinstance(line, WaitLine):
            continue
        for n, member in enumerate(communications(line)):
            if not isinstance(member, GradientMove):
                continue
            for what, new in _other_moves(member, len(joint.stage.axis_sizes)):
                other = with_member(line, n, new)
                changed = with_line(joint, "backward", i, other)
                if isinstance(line, StartLine) and isinstance(other, StartLine):
                    yield f"begun as another: {what} {i}", changed
                    k = next(
                        k
                        for k, wait in enumerate(joint.backward)
                        if isinstance(wait, WaitLine) and wait.pending == line.pending
                    )
                    wait = WaitLine(other.move, line.pending)
                    changed = with_line(changed, "backward", k, wait)
                yield f"{what} {i} {line}", changed


def with_member(line: JointLine, n: int, new: GatherLine | GradientMove) -> JointLine:
    """The line with another communication in place of its n-th."""
    match line:
        case StartLine() | WaitLine():
            move = with_member(line.move, n, new)
            assert isinstance(move, GatherLine | GradientMove | FusedGathers | FusedReductions)
            return replace(line, move=move)
        case FusedGathers() | FusedReductions():
            members: Any = (*line.members[:n], new, *line.members[n + 1 :])
            return replace(line, members=members)
    return new


def _other_moves(line: GradientMove, n_axes: int) -> Iterator[tuple[str, GradientMove]]:
    move, out = line.move.move, line.out
    axes = tuple(a for a in range(n_axes) if a not in move.axes) or (move.axes[0] + 1,)
    yield "axes", replace(line, move=replace(line.move, move=replace(move, axes=axes)))
    if move.transposed != move:
        yield "direction", replace(line, move=replace(line.move, move=move.transposed))
    yield "shape", replace(line, out=replace(out, shape=(*out.shape, 1)))
    other = torch.float16 if out.dtype != torch.float16 else torch.float32
    yield "dtype", replace(line, out=replace(out, dtype=other))
    assert out.spec is not None
    swaps = {R: P, P: R, I: P}
    for axis in move.axes:
        placements = list(out.spec.placements)
        placements[axis] = swaps.get(placements[axis], R)
        spec = Spec(tuple(placements), out.spec.order)
        yield "spec", replace(line, out=replace(out, spec=spec))


def sourced_otherwise(joint: JointProgram) -> Mutants:
    """Another gradient of the same shape, placed otherwise, in place of the right one."""
    there: dict[str, Variable] = {}
    for i, line in enumerate(joint.backward):
        match line:
            case GradientMove() | ReadyLine() | StartLine() | FusedReductions():
                used = line.reads[0]
            case KernelLine(key="", is_forward=False):
                used = line.reads[1]
            case FunctionBackward():
                used = next(name for name in line.gradients if name is not None)
            case _:
                used = ""
        right = there.get(used)
        for name, other in there.items():
            if right is not None and right.spec is not None and other.spec is not None:
                same_values = _values(other.spec) == _values(right.spec)
                if other.shape == right.shape and not same_values:
                    new = _reading(line, used, name)
                    yield f"source {name} for {used}", with_line(joint, "backward", i, new)
        if isinstance(line, FreeLine):
            for name in line.names:
                there.pop(name, None)
        elif not _is_of_forward(line):
            there |= {out.name: out for out in _made(line)}


def handed_over_otherwise(joint: JointProgram) -> Mutants:
    for i, line in enumerate(joint.backward):
        if isinstance(line, ReadyLine):
            for position in range(-1, len(joint.taken) + 1):
                if position != line.position:
                    wrong = replace(line, position=position)
                    yield f"position {position} {line}", with_line(joint, "backward", i, wrong)
            if line.is_shared:
                owned = replace(line, is_shared=False)
                yield f"not copied {line}", with_line(joint, "backward", i, owned)


def written_in_place(joint: JointProgram) -> Mutants:
    """Kernels that take the memory of their first argument, which others read."""
    kinds = {f"aten.{word}.Tensor": f"aten.{word}_.Tensor" for word in ("add", "mul")}
    for i, line in enumerate(joint.backward):
        if isinstance(line, KernelLine) and line.target in kinds and line.reads:
            first = line.args[0]
            later = {name for other in joint.backward[i + 1 :] for name in other.reads}
            if isinstance(first, Ref) and (first.name in joint.saved or first.name in later):
                written = replace(line, target=kinds[line.target])
                yield f"in place {i} {line}", with_line(joint, "backward", i, written)


def run_otherwise(joint: JointProgram) -> Mutants:
    """Lines of forward with another argument, in forward and where they run again."""
    for function, i, line in numbered(joint):
        match line:
            case CallLine() if line.reads:
                new: JointLine = replace(line, args=(*line.args, 1))
            case FunctionLine():
                new = replace(line, call=replace(line.call, args=(*line.call.args, 1)))
            case MoveLine():
                new = replace(line, move=line.move.transposed)
                if new == line:
                    continue
            case GatherLine() | FusedGathers() | StartLine() if gathers_parameters(line):
                first = communications(line)[0]
                assert isinstance(first, GatherLine)
                new = with_member(line, 0, replace(first, moves=first.moves[:-1]))
            case _:
                continue
        yield f"other {function} {i} {line}", with_line(joint, function, i, new)


def given_otherwise(joint: JointProgram) -> Mutants:
    for i, name in enumerate(joint.cotangents):
        if name is not None:
            given = (*joint.cotangents[:i], None, *joint.cotangents[i + 1 :])
            yield f"no {name}", replace(joint, cotangents=given)
            fewer = (*joint.cotangents[:i], *joint.cotangents[i + 1 :])
            yield f"fewer than {name}", replace(joint, cotangents=fewer)


MUTATIONS: tuple[Callable[[JointProgram], Mutants], ...] = (
    dropped, duplicated, swapped, freed_early, leaked, saved_otherwise, moved_otherwise,
    sourced_otherwise, handed_over_otherwise, written_in_place, run_otherwise, given_otherwise,
)  # fmt: skip


def _depend(a: JointLine, b: JointLine) -> bool:
    """May `b` not come before `a`?"""
    made, freed = {*a.writes, *_freed(a)}, {*b.writes, *_freed(b)}
    return not (made.isdisjoint({*b.reads, *freed}) and freed.isdisjoint(a.reads))


def _freed(line: JointLine) -> Sequence[str]:
    return line.names if isinstance(line, FreeLine) else ()


def gathers_parameters(line: JointLine) -> bool:
    return any(isinstance(one, GatherLine) for one in communications(line))


def _is_of_forward(line: JointLine) -> bool:
    kinds = MoveLine | CallLine | FunctionLine
    is_kernel = isinstance(line, KernelLine) and line.is_forward
    return isinstance(line, kinds) or is_kernel or gathers_parameters(line)


def _made(line: JointLine) -> Sequence[Variable]:
    match line:
        case KernelLine() | FunctionBackward():
            return line.outs
        case GradientMove() | FusedReductions() | WaitLine():
            moves = (x for x in communications(line) if isinstance(x, GradientMove))
            return [move.out for move in moves]
        case _:
            return ()


def _values(spec: Spec) -> tuple[Any, ...]:
    return tuple(R if p == I else p for p in spec.placements), spec.order


def _reading(line: JointLine, old: str, new: str) -> JointLine:
    match line:
        case ReadyLine():
            return replace(line, source=new)
        case GradientMove() | StartLine() | FusedReductions():
            return with_member(line, 0, replace(communications(line)[0], source=new))
        case KernelLine():
            return replace(line, args=tuple(Ref(new) if a == Ref(old) else a for a in line.args))
        case FunctionBackward():
            given = tuple(new if name == old else name for name in line.gradients)
            return replace(line, gradients=given)
    raise AssertionError(line)
