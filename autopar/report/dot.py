"""The chosen plan as a Graphviz graph: stages as clusters, equal blocks folded, reshards on edges.

A box is a module's operators; its coloured cells are the placement of the result on each axis
with several ranks; the lines below are parameters, stored -> used. An edge is labelled where
the tensor is resharded: the collective forward | backward, with the bytes that one rank moves
for one microbatch. A reshard that several boxes read happens once, and is drawn once. Collectives
that turn parameters into use, and gradients back, are in the stage's title, per step.

Names come from the user's model: all text is in HTML-like labels and escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import graphviz

from autopar.collective import step_calls, summarise
from autopar.moves import COLLECTIVES
from autopar.pipeline import Pipeline
from autopar.report.folding import Section, fold, is_collective
from autopar.report.picture import VIEWS, Edge, Node, ParameterUsed, operator_name, picture
from autopar.report.tables import traffic_rows
from autopar.spec import Spec
from autopar.stage_program import MoveLine, StageProgram
from autopar.units import format_bytes

INSTALL_HINT = "no picture: Graphviz's `dot` is not installed (apt install graphviz)"
COLOURS = {
    "data": "#b7e1b0",
    "tensor": "#a9cdf5",
    "sequence": "#fbe08d",
    "replicated": "#e4e4e4",
    "partial": "#f4b0a6",
}
_MEANINGS = {
    "data": "sharded along the batch",
    "tensor": "sharded along a parameter's factor",
    "sequence": "sharded along another dim",
    "replicated": "the same on every rank (R, I)",
    "partial": "to be summed over ranks (P)",
}
_TRAFFIC, _LOCAL, _PLAIN, _FRAME = "#b3261e", "#8a6d3b", "#555555", "#9aa5b1"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def dot(model: str, pipeline: Pipeline) -> str:
    """The stages of a plan as DOT text; ends in a newline."""
    graph = graphviz.Digraph(
        "plan",
        graph_attr={
            "rankdir": "TB", "fontname": "Helvetica", "fontsize": "13", "labelloc": "t",
            "nodesep": "0.3", "ranksep": "0.22",
            "label": f"<<B>{escaped(model)}</B>>",
        },
        node_attr={"shape": "plain", "fontname": "Helvetica", "fontsize": "11"},
        edge_attr={"color": _PLAIN, "arrowsize": "0.7"},
    )  # fmt: skip
    programs = pipeline.stages
    for stage, program in enumerate(programs):
        with graph.subgraph(name=f"cluster_stage_{stage}") as cluster:
            cluster.attr(label=_stage_title(program, stage, len(programs)), **_frame("#fbfbfb"))
            _draw_stage(cluster, program, f"s{stage}_")
    graph.node("legend", label=_legend())
    return str(graph.source)


def render_svg(source: str) -> str | None:
    """DOT text as an `<svg>` element; None where the program `dot` is not installed."""
    try:
        text = str(graphviz.pipe("dot", "svg", source.encode()).decode())
    except graphviz.ExecutableNotFound:
        return None
    return text[text.index("<svg") :]


def escaped(text: str) -> str:
    """`text` for an HTML-like label or a page; characters that XML forbids become `?`."""
    return html.escape(_CONTROL.sub("?", text))


# -- a stage ---------------------------------------------------------------------------------------


def _draw_stage(cluster: graphviz.Digraph, program: StageProgram, prefix: str) -> None:
    shown = picture(program)
    sections, edges = fold(shown)
    within = {i: number for number, s in enumerate(sections) if _is_framed(s) for i in s.nodes}
    inner: dict[int, list[Edge]] = defaultdict(list)
    outer: list[Edge] = []
    for source, members in _by_value(edges).items():
        homes = {within.get(i, -1) for i in (source[0], *(e.target for e in members))}
        # A reshard of one block is drawn inside it.
        (inner[homes.pop()] if len(homes) == 1 else outer).extend(members)
    for number, section in enumerate(sections):
        boxes = [
            (f"{prefix}{i}", _label(shown.nodes[i], program, _is_framed(section)))
            for i in section.nodes
        ]
        if not _is_framed(section):
            for name, label in boxes:
                cluster.node(name, label=label)
            continue
        with cluster.subgraph(name=f"cluster_{prefix}block_{number}") as block:
            block.attr(label=_block_title(section), **_frame("#eef2f7"))
            for name, label in boxes:
                block.node(name, label=label)
            _draw_edges(block, inner[number], program, prefix)
    _draw_edges(cluster, [*inner[-1], *outer], program, prefix)


def _is_framed(section: Section) -> bool:
    """A block has a frame, unless it is one box alone."""
    return bool(section.blocks[0].index) and len(section.nodes) + len(section.copies) > 2


def _by_value(edges: Sequence[Edge]) -> dict[tuple[int, str], list[Edge]]:
    """Edges that share what they carry, by its source and variable."""
    found: dict[tuple[int, str], list[Edge]] = defaultdict(list)
    for edge in edges:
        found[edge.source, edge.value].append(edge)
    return found


def _draw_edges(
    cluster: graphviz.Digraph, edges: Sequence[Edge], program: StageProgram, prefix: str
) -> None:
    drawn: set[tuple[int, int]] = set()
    for (source, value), members in _by_value(edges).items():
        moves = members[0].moves
        if not _traffic(moves, program):
            for target in dict.fromkeys(e.target for e in members):
                if (source, target) not in drawn:
                    cluster.edge(f"{prefix}{source}", f"{prefix}{target}")
                drawn.add((source, target))
            continue
        pill, look = f"{prefix}{source}_{value}", _look(moves)
        cluster.node(pill, label=_pill(moves, program, look["color"]))
        cluster.edge(f"{prefix}{source}", pill, arrowhead="none", **look)
        for target in dict.fromkeys(e.target for e in members):
            cluster.edge(pill, f"{prefix}{target}", **look)


def _look(moves: Sequence[MoveLine]) -> dict[str, str]:
    if is_collective(moves):
        return {"color": _TRAFFIC, "penwidth": "1.8"}
    return {"color": _LOCAL, "style": "dashed"}


def _pill(moves: Sequence[MoveLine], program: StageProgram, colour: str) -> str:
    """A reshard's label, a node on its edge: Graphviz bends an edge around a label."""
    lines = "<BR/>".join(escaped(text) for text in _traffic(moves, program))
    return (
        f'<<TABLE BORDER="1" STYLE="ROUNDED" CELLBORDER="0" CELLSPACING="0" CELLPADDING="1" '
        f'COLOR="{colour}" BGCOLOR="white"><TR><TD><FONT POINT-SIZE="10" COLOR="{colour}">'
        f"{lines}</FONT></TD></TR></TABLE>>"
    )


def _traffic(moves: Sequence[MoveLine], program: StageProgram) -> list[str]:
    """Each reshard as `all_reduce tp 32.0 KiB | -`, forward | backward."""
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


def _stage_title(program: StageProgram, stage: int, n_stages: int) -> str:
    axes = " × ".join(
        f"{a}={n}" for a, n in zip(program.axis_names, program.axis_sizes, strict=True)
    )
    n = program.n_microbatches
    title = f"stage {stage} of {n_stages} on ({axes}), {n} microbatch{'' if n == 1 else 'es'}"
    calls = summarise(step_calls(program), program.axis_names, stage)
    rows = [
        f"{'gradients' if row.phase == 'grad_sync' else 'parameters'}: {row.calls} × {row.kind} "
        f"{row.axis}, {format_bytes(row.size_bytes)} per step"
        for row in traffic_rows([c for c in calls if c.phase in ("grad_sync", "param_gather")])
    ]
    small = "".join(f'<BR/><FONT POINT-SIZE="11">{escaped(row)}</FONT>' for row in rows)
    return f"<<B>{escaped(title)}</B>{small}>"


def _block_title(section: Section) -> str:
    first, last = section.blocks[0], section.blocks[-1]
    if len(section.blocks) == 1:
        return f"<<B>{escaped(first.path)}</B>>"
    span = f"{first.path} … {last.index}"
    return f'<{escaped(span)} <FONT POINT-SIZE="18"><B> × {len(section.blocks)}</B></FONT>>'


def _frame(fill: str) -> dict[str, str]:
    return {"style": "rounded,filled", "color": _FRAME, "fillcolor": fill, "fontsize": "13"}


# -- a box -----------------------------------------------------------------------------------------


def _label(node: Node, program: StageProgram, framed: bool) -> str:
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
        f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3" COLOR="{_FRAME}" '
        f'BGCOLOR="white"{style}>{"".join(rows)}</TABLE>>'
    )


def _row(content: str, width: int) -> str:
    return f'<TR><TD COLSPAN="{width}">{content}</TD></TR>'


def _cell(node: Node, axis: int, program: StageProgram) -> str:
    assert node.result is not None
    colour = COLOURS[node.shards[axis]]
    text = f"{program.axis_names[axis]} {node.result.spec.placements[axis]}"
    return f'<TD BGCOLOR="{colour}">{escaped(text)}</TD>'


def _titles(node: Node, framed: bool) -> list[str]:
    """What the box is, and the operators in it."""
    if not node.lines:
        return [f"<B>{escaped(node.name)}</B>" + (" (input)" if node.kind == "input" else "")]
    names = [operator_name(line) for line in node.lines]
    counts = Counter([name for name in names if name not in VIEWS] or names)
    operators = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in counts.items())
    # In a frame, names are the block's own; alone, the whole path.
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


def _path(node: Node) -> str:
    return ".".join(part for part in (node.block.path, node.name) if part)


def _parameters(node: Node, program: StageProgram, axes: Sequence[int]) -> list[str]:
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


def _parameter_name(node: Node, name: str) -> str:
    relative = node.block.relative(name)
    own = f"{node.name}."
    return relative[len(own) :] if node.name and relative.startswith(own) else relative


def _placing(used: ParameterUsed, program: StageProgram, axes: Sequence[int]) -> str:
    stored, spec = (_spec(s, axes) for s in (used.parameter.stored.spec, used.spec))
    text = stored if stored == spec else f"{stored} → {spec}"
    if used.gathers:
        traffic = "".join(f"\n  {line}" for line in _traffic(used.gathers, program))
        return f"{text}, at each use{traffic}"
    return text if used.parameter.period == "step" else f"{text} each microbatch"


def _spec(spec: Spec, axes: Sequence[int]) -> str:
    """Placements on the axes that have several ranks."""
    text = " ".join(str(spec.placements[axis]) for axis in axes) or "whole"
    return f"{text} order {','.join(map(str, spec.order))}" if spec.order else text


def _inner(node: Node, program: StageProgram) -> list[str]:
    """Collectives inside operators that have a lowering of their own."""
    out = []
    for line in node.lines:
        if line.inner_bytes:
            axes = "+".join(program.axis_names[axis] for axis in line.lowered_axes)
            size = format_bytes(math.fsum(line.inner_bytes))
            out.append(f"inside: {len(line.inner_bytes)} × all_reduce {axes}, {size}")
    return out


def _legend() -> str:
    rows = [
        f'<TR><TD BGCOLOR="{COLOURS[kind]}">{kind}</TD><TD ALIGN="LEFT">{escaped(text)}</TD></TR>'
        for kind, text in _MEANINGS.items()
    ]
    notes = {
        f'<FONT COLOR="{_TRAFFIC}">axis: a | b</FONT>':
            "reshard: forward | backward, bytes per microbatch and rank",
        f'<FONT COLOR="{_LOCAL}">axis: slice</FONT>': "reshard without communication",
        "<B>stored → used</B>": "parameters; one placement per axis",
        "<B>× N</B>": "N equal blocks in a row",
    }  # fmt: skip
    rows += [
        f'<TR><TD>{key}</TD><TD ALIGN="LEFT">{escaped(text)}</TD></TR>'
        for key, text in notes.items()
    ]
    return (
        f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3" COLOR="{_FRAME}">'
        '<TR><TD COLSPAN="2"><B>legend</B>: how a result is placed</TD></TR>'
        f"{''.join(rows)}</TABLE>>"
    )
