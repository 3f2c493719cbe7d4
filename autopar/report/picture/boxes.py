"""Labels of the picture: HTML-like tables for modules, and texts for reshards."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence

from autopar.placement import COLLECTIVES, Spec
from autopar.program.lines import MoveLine, StageProgram
from autopar.report.picture.kinds import ParameterUsed
from autopar.report.picture.nodes import VIEWS, PictureNode, operator_name
from autopar.units import format_bytes

COLOURS = {
    "data": "#b7e1b0",
    "tensor": "#a9cdf5",
    "sequence": "#fbe08d",
    "replicated": "#e4e4e4",
    "partial": "#f4b0a6",
}
TRAFFIC, LOCAL, PLAIN, FRAME, TIED = "#b3261e", "#8a6d3b", "#555555", "#9aa5b1", "#6a4fa3"
CROSSING = {"color": TRAFFIC, "penwidth": "2.6"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def escaped(text: str) -> str:
    """`text` for an HTML-like label or a page; characters that XML forbids become `?`."""
    return html.escape(_CONTROL.sub("?", text))


def box_label(node: PictureNode, program: StageProgram, framed: bool) -> str:
    """The box of a module: its operators, the placement of its result, its parameters."""
    axes = [i for i, size in enumerate(program.axis_sizes) if size > 1]
    width = max(len(axes), 1)
    rows = [_row(title, width) for title in _titles(node, framed)]
    if node.result is not None and axes:
        rows.append(f"<TR>{''.join(_cell(node, axis, program) for axis in axes)}</TR>")
    notes = [*_parameters(node, program, axes), *_inner(node, program)]
    if notes:
        lines = '<BR ALIGN="LEFT"/>'.join(escaped(note) for note in notes)
        rows.append(_row(f'<FONT POINT-SIZE="9">{lines}<BR ALIGN="LEFT"/></FONT>', width))
    style = ' STYLE="ROUNDED"' if not node.lines else ""
    return (
        f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3" COLOR="{FRAME}" '
        f'BGCOLOR="white"{style}>{"".join(rows)}</TABLE>>'
    )


def _row(content: str, width: int) -> str:
    return f'<TR><TD COLSPAN="{width}">{content}</TD></TR>'


def _cell(node: PictureNode, axis: int, program: StageProgram) -> str:
    assert node.result is not None
    colour = COLOURS[node.shards[axis]]
    text = f"{program.axis_names[axis]} {node.result.spec.placements[axis]}"
    return f'<TD BGCOLOR="{colour}">{escaped(text)}</TD>'


def _titles(node: PictureNode, framed: bool) -> list[str]:
    """The title of the box, and below it the operators in it."""
    if not node.lines:
        return [f"<B>{escaped(node.name)}</B>" + (" (input)" if node.kind == "input" else "")]
    names = [operator_name(line) for line in node.lines]
    counts = Counter([name for name in names if name not in VIEWS] or names)
    operators = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in counts.items())
    # In a frame, names are relative to the block; outside, they are whole paths.
    own, path = ("block", node.name) if framed else ("", _path(node))
    if node.kind == "elementwise" and len(counts) == 1:
        modules = [line.key.rpartition("/")[0] for line in node.lines]
        modules = [node.block.relative(m) for m in modules] if framed else modules
        title, small = operators, ", ".join(dict.fromkeys(m or own for m in modules))
    else:
        title, small = path or own or node.kind, operators
    rows = [f"<B>{escaped(title)}</B>"]
    if small:
        rows.append(f'<FONT POINT-SIZE="9" COLOR="#444444">{escaped(small)}</FONT>')
    return rows


def _path(node: PictureNode) -> str:
    return ".".join(part for part in (node.block.path, node.name) if part)


def _parameters(node: PictureNode, program: StageProgram, axes: Sequence[int]) -> list[str]:
    """Parameters with equal placements on one line: `weight 64×192: I S(1) -> R S(1)`."""
    rows: dict[str, list[str]] = {}
    for used in node.parameters:
        parameter = used.parameter
        shape = "×".join(map(str, parameter.shape)) or "scalar"
        rows.setdefault(_placing(used, program, axes), []).append(
            f"{_parameter_name(node, parameter.name)} {shape}"
        )
    return [
        line
        for placing, names in rows.items()
        for line in f"{', '.join(names)}: {placing}".split("\n")
    ]


def _parameter_name(node: PictureNode, name: str) -> str:
    relative = node.block.relative(name)
    own = f"{node.name}."
    return relative[len(own) :] if node.name and relative.startswith(own) else relative


def _placing(used: ParameterUsed, program: StageProgram, axes: Sequence[int]) -> str:
    stored, spec = (_spec(s, axes) for s in (used.parameter.stored.spec, used.spec))
    text = stored if stored == spec else f"{stored} → {spec}"
    if used.gathers:
        lines = "".join(f"\n  {line}" for line in traffic(used.gathers, program))
        return f"{text}, at each use{lines}"
    return text if used.parameter.period == "step" else f"{text} each microbatch"


def _spec(spec: Spec, axes: Sequence[int]) -> str:
    """The placements on `axes`, those with several ranks."""
    text = " ".join(str(spec.placements[axis]) for axis in axes) or "whole"
    return f"{text} order {','.join(map(str, spec.order))}" if spec.order else text


def _inner(node: PictureNode, program: StageProgram) -> list[str]:
    """Collectives inside operators that have their own lowering."""
    out = []
    for line in node.lines:
        if line.inner:
            axes = "+".join(program.axis_names[axis] for axis in line.lowered_axes)
            for kind in dict.fromkeys(call.kind for call in line.inner):
                alike = [call for call in line.inner if call.kind == kind]
                sizes = [call.size_bytes for call in alike for _ in range(call.count)]
                out.append(f"inside: {len(sizes)} × {kind} {axes}, {format_bytes(sum(sizes))}")
    return out


def pill(lines: Sequence[str], colour: str, border: int = 1) -> str:
    """The label of an edge, as a node on the edge: Graphviz bends an edge around a label."""
    text = "<BR/>".join(escaped(line) for line in lines)
    return (
        f'<<TABLE BORDER="{border}" STYLE="ROUNDED" CELLBORDER="0" CELLSPACING="0" '
        f'CELLPADDING="1" COLOR="{colour}" BGCOLOR="white"><TR><TD>'
        f'<FONT POINT-SIZE="10" COLOR="{colour}">{text}</FONT></TD></TR></TABLE>>'
    )


def traffic(moves: Sequence[MoveLine], program: StageProgram) -> list[str]:
    """Each reshard as `tp: all_reduce 32.0 KiB | –`, forward | backward."""
    out = []
    for line in moves:
        sides = [_side(line.move.forward, line.forward_bytes)]
        if line.has_grad:
            sides.append(_side(line.move.backward, line.backward_bytes))
        if any(side != "–" for side in sides):
            out.append(f"{_axes(line, program)}: {' | '.join(sides)}")
    return out


def _side(kind: str, size_bytes: int) -> str:
    if kind in COLLECTIVES:
        return f"{kind} {format_bytes(size_bytes)}"
    return "–" if kind == "identity" else kind


def _axes(line: MoveLine, program: StageProgram) -> str:
    return "+".join(program.axis_names[axis] for axis in line.move.axes)
