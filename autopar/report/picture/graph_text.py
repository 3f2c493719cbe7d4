"""A plan as a Graphviz graph: stages are clusters, equal blocks are folded, edges show reshards.

A box is a module's operators. Its coloured cells show the placement of the result on each axis
with several ranks. The lines below them are parameters, stored -> used. An edge has a label if the
tensor is resharded: the collective forward | backward, and the bytes that one rank moves for one
microbatch. A reshard that several boxes read happens once, and is drawn once. The stage's title
lists, per step, the collectives that gather parameters and that synchronise gradients.

What crosses between stages is drawn between the clusters: the bytes of one microbatch over all
ranks, and both shardings if the two sides differ. Dashed lines join parameters that stages share.
The first clocks of the schedule are beside the legend.

Names come from the user's model, so all text is in HTML-like labels and escaped.
"""

from __future__ import annotations

from collections import defaultdict

import graphviz

from autopar.program.communication import step_calls, summarise
from autopar.program.lines import Boundary, Crossing, Pipeline, StageProgram
from autopar.report.picture.boxes import (
    COLOURS,
    CROSSING,
    FRAME,
    LOCAL,
    PLAIN,
    TIED,
    TRAFFIC,
    escaped,
    pill,
)
from autopar.report.picture.stage_graph import StageGraph, frame
from autopar.report.stages import axes_text, crossing_bytes, grid, span
from autopar.report.tables import traffic_rows
from autopar.schedule import Action
from autopar.units import format_bytes

_MEANINGS = {
    "data": "sharded along the batch",
    "tensor": "sharded along a parameter's factor",
    "sequence": "sharded along another dim",
    "replicated": "the same on every rank (R, I)",
    "partial": "to be summed over ranks (P)",
}
_FORWARD, _BACKWARD, _WEIGHTS = "#ffffff", "#cfd4da", "#e8ebee"


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
        edge_attr={"color": PLAIN, "arrowsize": "0.7"},
    )  # fmt: skip
    stages = _stage_graphs(pipeline)
    for number, stage in enumerate(stages):
        with graph.subgraph(name=f"cluster_stage_{number}") as cluster:
            cluster.attr(label=_stage_title(pipeline, number), **frame("#fbfbfb"))
            stage.draw(cluster)
    for number, crossing in enumerate(pipeline.crossings):
        label = pill(_crossing_lines(crossing, pipeline), CROSSING["color"], border=2)
        graph.node(_crossing_name(number), label=label)
    for stage in stages:
        for source, target, look in stage.edges_across:
            graph.edge(source, target, **look)
    _draw_ties(graph, pipeline, stages)
    graph.node("legend", label=_legend(pipeline))
    if pipeline.n_stages > 1:
        graph.node("schedule", label=_schedule(pipeline))
    return str(graph.source)


def _stage_graphs(pipeline: Pipeline) -> list[StageGraph]:
    received: dict[int, dict[str, list[str]]] = defaultdict(dict)
    sent: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for number, crossing in enumerate(pipeline.crossings):
        name = _crossing_name(number)
        received[crossing.target][crossing.value] = [name]
        sent[crossing.source][crossing.value].append(name)
    return [
        StageGraph(program, f"s{stage}_", received[stage], sent[stage])
        for stage, program in enumerate(pipeline.stages)
    ]


def _stage_title(pipeline: Pipeline, stage: int) -> str:
    program, n_stages = pipeline.stages[stage], pipeline.n_stages
    axes = axes_text(program.axis_names, program.axis_sizes, " × ")
    n = program.n_microbatches
    ranks = pipeline.meshes[stage].ranks
    where = f", rank{'s' if len(ranks) > 1 else ''} {span(ranks)}" if n_stages > 1 else ""
    title = f"stage {stage} of {n_stages} on ({axes}){where}, {n} microbatch"
    title += "" if n == 1 else "es"
    calls = summarise(step_calls(program), program.axis_names, stage)
    rows = [
        f"{'gradients' if row.phase == 'grad_sync' else 'parameters'}: {row.calls} × {row.kind} "
        f"{row.axis}, {format_bytes(row.size_bytes)} per step"
        for row in traffic_rows([c for c in calls if c.phase in ("grad_sync", "param_gather")])
    ]
    small = "".join(f'<BR/><FONT POINT-SIZE="11">{escaped(row)}</FONT>' for row in rows)
    return f"<<B>{escaped(title)}</B>{small}>"


def _crossing_name(number: int) -> str:
    return f"crossing_{number}"


def _crossing_lines(crossing: Crossing, pipeline: Pipeline) -> list[str]:
    """`stage 0 → 1: 8.0 KiB | 8.0 KiB`, and both shardings if they differ."""
    forward_bytes, backward_bytes = crossing_bytes(crossing, pipeline)
    backward = "–" if backward_bytes is None else format_bytes(backward_bytes)
    lines = [
        f"stage {crossing.source} → {crossing.target}: {format_bytes(forward_bytes)} | {backward}"
    ]
    sent = _cut(crossing.sent, pipeline.stages[crossing.source])
    received = _cut(crossing.received, pipeline.stages[crossing.target])
    return lines if sent == received else [*lines, f"{sent} → {received}"]


def _cut(boundary: Boundary, program: StageProgram) -> str:
    """`dp=2 S(0)` for every axis that shards the value."""
    spec = boundary.local.spec
    words = [
        f"{name}={size} {placement}"
        for name, size, placement in zip(
            program.axis_names, program.axis_sizes, spec.placements, strict=True
        )
        if size > 1 and placement.is_shard
    ]
    return ", ".join(words) or "whole"


def _draw_ties(graph: graphviz.Digraph, pipeline: Pipeline, stages: list[StageGraph]) -> None:
    """Dashed lines from the owner's box; they do not affect the layout."""
    for tie in pipeline.ties:
        boxes = [stages[stage].box_with(name) for stage, name in tie.places]
        for box in boxes[1:]:
            if boxes[0] and box:
                graph.edge(
                    boxes[0], box, dir="both", style="dashed", color=TIED, fontcolor=TIED,
                    fontsize="10", constraint="false", label=f"<tied: {escaped(tie.name)}>",
                )  # fmt: skip


def _schedule(pipeline: Pipeline) -> str:
    clocks, schedule = grid(pipeline), pipeline.schedule
    n_shown, has_chunks = len(clocks.rows[0]), schedule.n_chunks > 1
    who = "device" if has_chunks else "stage"
    rows = [
        f"<TR><TD>{who} {k}</TD>{''.join(_clock(action, has_chunks) for action in actions)}</TR>"
        for k, actions in enumerate(clocks.rows)
    ]
    words = (
        "F forward, I gradients of inputs, W of weights of a microbatch, as if all took as long"
        if schedule.splits_backward
        else "F forward, B backward of a microbatch, as if both took the same time"
    )
    before = "before the letter, the stage; " if has_chunks else ""
    some = f"the first {n_shown} of {clocks.n_clocks} clocks" if n_shown < clocks.n_clocks else ""
    return (
        f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="1" CELLPADDING="3" COLOR="{FRAME}">'
        f'<TR><TD COLSPAN="{n_shown + 1}"><B>schedule</B>{some and ": " + some}</TD></TR>'
        f'{"".join(rows)}<TR><TD COLSPAN="{n_shown + 1}" ALIGN="LEFT"><FONT POINT-SIZE="9">'
        f"{before}{words}</FONT></TD></TR></TABLE>>"
    )


def _clock(action: Action | None, has_chunks: bool) -> str:
    """A cell: `F0`, or `2F0` if a device has several stages."""
    if action is None:
        return "<TD></TD>"
    text = str(action) if has_chunks else str(action).removeprefix(str(action.stage))
    colour = {"forward": _FORWARD, "backward_weight": _WEIGHTS}.get(action.kind, _BACKWARD)
    return f'<TD BORDER="1" COLOR="{FRAME}" BGCOLOR="{colour}">{text}</TD>'


def _legend(pipeline: Pipeline) -> str:
    rows = [
        f'<TR><TD BGCOLOR="{COLOURS[kind]}">{kind}</TD><TD ALIGN="LEFT">{escaped(text)}</TD></TR>'
        for kind, text in _MEANINGS.items()
    ]
    notes = {
        f'<FONT COLOR="{TRAFFIC}">axis: a | b</FONT>':
            "reshard: forward | backward, bytes per microbatch and rank",
        f'<FONT COLOR="{LOCAL}">axis: slice</FONT>': "reshard without communication",
        "<B>stored → used</B>": "parameters; one placement per axis",
        "<B>× N</B>": "N equal blocks in a row",
    }  # fmt: skip
    if pipeline.crossings:
        notes[f'<FONT COLOR="{TRAFFIC}">stage i → j: a | b</FONT>'] = (
            "sent between stages: forward | backward, bytes per microbatch, all ranks"
        )
    if pipeline.ties:
        notes[f'<FONT COLOR="{TIED}">tied</FONT>'] = "one parameter on two stages: gradients added"
    rows += [
        f'<TR><TD>{key}</TD><TD ALIGN="LEFT">{escaped(text)}</TD></TR>'
        for key, text in notes.items()
    ]
    return (
        f'<<TABLE BORDER="1" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3" COLOR="{FRAME}">'
        '<TR><TD COLSPAN="2"><B>legend</B>: how a result is placed</TD></TR>'
        f"{''.join(rows)}</TABLE>>"
    )
