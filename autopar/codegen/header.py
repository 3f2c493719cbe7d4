"""The head of a generated file: imports, and a global for each operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.codegen.statements import Statements, moves_of, phase_of
from autopar.codegen.words import LINE_LENGTH, wrapped
from autopar.program.lines import CallLine, FunctionLine, JointLine, KernelLine


def imports(lines: Sequence[JointLine], decorator: str) -> list[str]:
    """What the lines use of the runtime; `decorator` is that of regions, if there are any."""
    moves: set[str] = set()
    functions: set[str] = set()
    needs_phase = False
    for line in lines:
        if isinstance(line, KernelLine):
            continue
        needs_phase |= phase_of(line) != ""
        moves.update(move.name for move in moves_of(line))
        match line:
            case CallLine(lowered=str(name)) | FunctionLine(call=CallLine(lowered=str(name))):
                functions.add(name)
            case FunctionLine():
                functions.add("taped")
    out = ["import torch", ""]
    if moves:
        out += wrapped("from autopar.runtime.collectives import ", sorted(moves))
    if decorator:
        out.append(f"from autopar.runtime.execute import {decorator}")
    if needs_phase:
        out.append("from autopar.runtime.groups import phase")
    if functions:
        out += wrapped("from autopar.runtime.lowered import ", sorted(functions))
    return out if len(out) > 2 else out[:1]


def bindings(lines: Sequence[JointLine], statements: Statements) -> list[str]:
    """Operators, looked up once; a taped one has its backward with it."""
    targets: set[str] = set()
    found: dict[str, str] = {}
    for line in lines:
        match line:
            case KernelLine() | CallLine(lowered=None):
                targets.add(line.target)
            case FunctionLine(call=CallLine(lowered=None)):
                target, given = line.call.target, line.differentiable
                handle = statements.function_handle(line)
                found[handle] = f"taped(torch.ops.{target}, {given})"
    found |= {statements.operator_handle(target): f"torch.ops.{target}" for target in targets}
    names = [name for name in sorted(found) if found[name].startswith("torch.ops.aten.")]
    out = ["aten = torch.ops.aten"] if names else []
    row: list[str] = []
    for name in [*names, ""]:
        if row and (not name or len(_bound([*row, name], found)) > LINE_LENGTH):
            out.append(_bound(row, found))
            row = []
        row += [name]
    return [*out, *(f"{name} = {found[name]}" for name in sorted(found.keys() - {*names}))]


def _bound(names: Sequence[str], found: Mapping[str, str]) -> str:
    """Names of operators and the operators, in a row."""
    operators = (found[name].removeprefix("torch.ops.") for name in names if name)
    return f"{', '.join(names)} = {', '.join(operators)}"
