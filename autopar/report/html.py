"""A plan as one HTML page: its picture, its prediction and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost.simulate import Timeline
from autopar.errors import OptionError
from autopar.plans import PlanData, Predicted
from autopar.program import Collective, Pipeline
from autopar.report.boxes import escaped
from autopar.report.graph_text import INSTALL_HINT, dot, render_svg
from autopar.report.page import document, html_table
from autopar.report.stages import (
    crossing_rows,
    grid,
    ideal_bubble,
    parameter_tables,
    stage_rows,
    tie_text,
)
from autopar.report.tables import (
    alternative_note,
    alternative_rows,
    headline,
    idle_warnings,
    optimality,
    traffic_rows,
)
from autopar.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report; `picture` says whether the page has a picture."""

    page: Path
    dot: Path
    picture: bool


def write_report(
    path: str | Path,
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    collectives: Sequence[Collective],
    timeline: Timeline | None = None,
) -> ReportFiles:
    """Write the page to `path`, and the graph beside it as `.dot`.

    The `timeline` of a step is drawn if the plan has several stages.

    Raises `OptionError` if a file cannot be written, or if `path` itself ends in `.dot`.
    """
    target = Path(path)
    dot_path = target.with_suffix(".dot")
    if dot_path == target:
        raise OptionError(f"{target} is the page's own graph", hint="name the page plan.html")
    source = dot(data.model, pipeline)
    svg = render_svg(source)
    text = page(data, pipeline, predicted, collectives, svg, dot_path.name, timeline)
    try:
        target.write_text(text, encoding="utf-8")
        dot_path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {error.filename}: {error.strerror}") from error
    return ReportFiles(target, dot_path, svg is not None)


def page(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    collectives: Sequence[Collective],
    svg: str | None,
    dot_name: str,
    timeline: Timeline | None = None,
) -> str:
    """The page; without an `svg` it says what is missing, and names the graph's file `dot_name`."""
    parts = [
        f"<h1>{escaped(headline(data))}</h1>",
        *(f'<p class="note">{escaped(text)}</p>' for text in idle_warnings(data)),
        f"<p>{escaped(_setting(data))}</p>",
        "<h2>Predicted</h2>", _prediction(predicted, pipeline),
        "<h2>Alternatives considered</h2>", _alternatives(data),
        "<h2>Picture</h2>", _picture(svg, dot_name),
        *(_stages(pipeline, predicted, timeline) if pipeline.n_stages > 1 else ()),
        "<h2>Parameters</h2>", *_parameters(pipeline),
        "<h2>Communication</h2>", _communication(collectives, pipeline.n_stages > 1),
    ]  # fmt: skip
    return document(f"{data.model}: parallel plan", parts)


def _setting(data: PlanData) -> str:
    shape = " x ".join(map(str, data.mesh.shape))
    inputs = ", ".join(f"{i.path} {i.dtype}{list(i.shape)}" for i in data.inputs)
    return (
        f"mesh {shape} of {data.mesh.hardware}; global batch {inputs}; precision "
        f"{data.precision}, optimizer {data.optimizer}; graph {data.graph_hash}"
    )


def _picture(svg: str | None, dot_name: str) -> str:
    if svg is None:
        return f'<p class="note">{escaped(f"{INSTALL_HINT}; its graph is in {dot_name}")}</p>'
    return f'<div class="picture">\n{svg}</div>'


def _stages(pipeline: Pipeline, predicted: Predicted, timeline: Timeline | None) -> list[str]:
    """The parts for several stages: a table of stages, what crosses, ties and the schedule."""
    stages = [
        (str(r.stage), r.ranks, r.axes, format_bytes(peak_bytes), r.modules)
        for r, peak_bytes in zip(stage_rows(pipeline), predicted.peak_bytes_per_stage, strict=True)
    ]
    crossings = [
        (
            r.value, r.stages, r.tensor, format_bytes(r.forward_bytes),
            "–" if r.backward_bytes is None else format_bytes(r.backward_bytes),
            r.sent, r.received,
        )
        for r in crossing_rows(pipeline)
    ]  # fmt: skip
    return [
        "<h2>Stages</h2>",
        html_table(
            "peak: bytes of tensors on one rank",
            ("#stage", "ranks", "mesh", "#peak", "modules"), stages,
        ),
        "<h2>Between stages</h2>",
        html_table(
            "one microbatch, all ranks together",
            ("value", "stages", "tensor", "#forward", "#backward", "sent", "received"), crossings,
        ),
        *(f"<p>{escaped(tie_text(tie))}</p>" for tie in pipeline.ties),
        "<h2>Schedule</h2>", _schedule(pipeline), *_timeline(timeline),
    ]  # fmt: skip


def _timeline(timeline: Timeline | None) -> list[str]:
    if timeline is None:
        return []
    return [
        "<p>The predicted step. Hover over a box to see its time.</p>",
        f'<div class="picture">\n{timeline.svg()}</div>',
    ]


def _schedule(pipeline: Pipeline) -> str:
    """The order of actions; the timeline shows their times."""
    clocks = grid(pipeline)
    rows = [
        (f"stage {stage}", *("" if action is None else str(action) for action in actions))
        for stage, actions in enumerate(clocks.rows)
    ]
    return html_table(
        f"as if all actions took the same time: clock 1 to {len(rows[0]) - 1} of "
        f"{clocks.n_clocks}; F forward, B backward of a microbatch",
        ("", *(str(clock + 1) for clock in range(len(rows[0]) - 1))), rows,
    )  # fmt: skip


def _prediction(predicted: Predicted, pipeline: Pipeline) -> str:
    rows = [
        ("step time", format_seconds(predicted.step_time_s)),
        ("compute", format_seconds(predicted.compute_time_s)),
        ("communication", format_seconds(predicted.comm_time_s)),
        ("communication not hidden", format_seconds(predicted.exposed_comm_s)),
        ("optimizer", format_seconds(predicted.optimizer_time_s)),
        ("pipeline bubble", f"{predicted.bubble:.1%}"),
        ("peak memory per rank", format_bytes(predicted.peak_bytes)),
        ("model FLOPs utilisation", f"{predicted.mfu:.1%}"),
    ]
    if pipeline.n_stages > 1:
        rows.append(("bubble of equal stages, free messages", f"{ideal_bubble(pipeline):.1%}"))
    if predicted.samples_per_s:
        rows.append(("samples/s", format_count(predicted.samples_per_s)))
    if predicted.tokens_per_s:
        rows.append(("tokens/s", format_count(predicted.tokens_per_s)))
    return html_table("per training step, optimizer included", ("", "#value"), rows)


def _parameters(pipeline: Pipeline) -> list[str]:
    """A table per stage, or per run of stages with equal tables."""
    tables = []
    for table in parameter_tables(pipeline):
        rows = [(r.pattern, str(r.count), r.shape, r.stored, r.used) for r in table.rows]
        caption = f"placements on {', '.join(table.axis_names)}; * stands for a number"
        if pipeline.n_stages > 1:
            caption = f"{table.title}: {caption}"
        tables.append(html_table(caption, ("parameter", "#count", "shape", "stored", "used"), rows))
    return tables


def _communication(collectives: Sequence[Collective], several_stages: bool) -> str:
    if not collectives:
        return "<p>none</p>"
    # Plans with one stage have no column of stages.
    first = 0 if several_stages else 1
    rows = [
        (
            str(row.stage), row.phase, row.kind, row.axis, str(row.calls),
            format_bytes(row.size_bytes),
        )[first:]
        for row in sorted(traffic_rows(collectives), key=lambda row: row.stage)
    ]  # fmt: skip
    return html_table(
        "per step and rank, all microbatches",
        ("#stage", "phase", "collective", "axis", "#calls", "#bytes")[first:], rows,
    )  # fmt: skip


def _alternatives(data: PlanData) -> str:
    if not data.alternatives:
        return f"<p>{escaped(data.chosen)}; no alternatives were tried</p>"
    shown, others = alternative_rows(data)
    rows = [
        (
            a.name,
            "–" if a.step_time_s is None else format_seconds(a.step_time_s),
            alternative_note(a, data),
        )
        for a in shown
    ]
    chosen = [i for i, a in enumerate(shown) if a.name == data.chosen]
    caption = optimality(data)
    table = html_table(caption, ("plan", "#predicted step", "note"), rows, chosen)
    return f"{table}\n<p>{escaped(others)}</p>" if others else table
