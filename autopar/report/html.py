"""A plan as one HTML page: the picture, what it predicts, and its tables.

The page loads nothing: style and picture are inside it. It is also well-formed XML, so any
parser reads it. Names come from the user's model and are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.collective import Collective
from autopar.errors import OptionError
from autopar.plan_data import PlanData
from autopar.predicted import Predicted
from autopar.report.dot import INSTALL_HINT, dot, escaped, render_svg
from autopar.report.tables import headline, idle_warning, parameter_rows, traffic_rows
from autopar.stage_program import StageProgram
from autopar.units import format_bytes, format_count, format_seconds

_STYLE = """
body { font: 15px/1.45 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 76em;
       padding: 0 1.5em; color: #1c2024; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 1.8em; }
table { border-collapse: collapse; } caption { text-align: left; color: #555; white-space: nowrap; }
th, td { padding: 0.2em 0.9em 0.2em 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #9aa5b1; } td.n, th.n { text-align: right; }
td { border-bottom: 1px solid #eceff2; font-variant-numeric: tabular-nums; }
tr.chosen td { font-weight: bold; background: #eef2f7; }
.picture { overflow-x: auto; } .picture svg { max-width: 100%; height: auto; }
.note { background: #fff6da; padding: 0.5em 0.8em; }
"""


@dataclass(frozen=True)
class ReportFiles:
    """What a report wrote; `picture` says whether the page has one."""

    page: Path
    dot: Path
    picture: bool


def write_report(
    path: str | Path,
    data: PlanData,
    programs: Sequence[StageProgram],
    predicted: Predicted,
    collectives: Sequence[Collective],
) -> ReportFiles:
    """Write the page, and the graph beside it as `.dot`.

    Raises `OptionError` where that cannot be written.
    """
    target = Path(path)
    dot_path = target.with_suffix(".dot")
    if dot_path == target:
        raise OptionError(f"{target} is the page's own graph", hint="name the page plan.html")
    source = dot(data.model, programs)
    svg = render_svg(source)
    text = page(data, programs, predicted, collectives, svg, dot_path.name)
    try:
        target.write_text(text, encoding="utf-8")
        dot_path.write_text(source, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {error.filename}: {error.strerror}") from error
    return ReportFiles(target, dot_path, svg is not None)


def page(
    data: PlanData,
    programs: Sequence[StageProgram],
    predicted: Predicted,
    collectives: Sequence[Collective],
    svg: str | None,
    dot_name: str,
) -> str:
    """The page; without an `svg` it says how to get one from the file `dot_name`."""
    parts = [
        f"<h1>{escaped(headline(data))}</h1>",
        *(f'<p class="note">{escaped(text)}</p>' for text in [idle_warning(data)] if text),
        f"<p>{escaped(_setting(data))}</p>",
        "<h2>Predicted</h2>", _prediction(predicted),
        "<h2>Alternatives considered</h2>", _alternatives(data),
        "<h2>Picture</h2>", _picture(svg, dot_name),
        "<h2>Parameters</h2>", *(_parameters(program) for program in programs),
        "<h2>Communication</h2>", _communication(collectives),
    ]  # fmt: skip
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{escaped(data.model)}: parallel plan</title>\n<style>{_STYLE}</style>\n"
        "</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


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


def _prediction(predicted: Predicted) -> str:
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
    if predicted.samples_per_s:
        rows.append(("samples/s", format_count(predicted.samples_per_s)))
    if predicted.tokens_per_s:
        rows.append(("tokens/s", format_count(predicted.tokens_per_s)))
    return _table("per training step, optimizer included", ("", "#value"), rows)


def _parameters(program: StageProgram) -> str:
    rows = [
        (row.pattern, str(row.count), row.shape, row.stored, row.used)
        for row in parameter_rows(program)
    ]
    caption = f"placements on {', '.join(program.axis_names)}; * stands for a number"
    return _table(caption, ("parameter", "#count", "shape", "stored", "used"), rows)


def _communication(collectives: Sequence[Collective]) -> str:
    if not collectives:
        return "<p>none</p>"
    rows = [
        (row.phase, row.kind, row.axis, str(row.calls), format_bytes(row.size_bytes))
        for row in traffic_rows(collectives)
    ]
    return _table(
        "per step and rank, all microbatches",
        ("phase", "collective", "axis", "#calls", "#bytes"), rows,
    )  # fmt: skip


def _alternatives(data: PlanData) -> str:
    if not data.alternatives:
        return f"<p>{escaped(data.chosen)}; nothing else was tried</p>"
    rows = [
        (a.name, "–" if a.step_time_s is None else format_seconds(a.step_time_s), a.note)
        for a in data.alternatives
    ]
    chosen = [i for i, a in enumerate(data.alternatives) if a.name == data.chosen]
    caption = f"proven gap of the chosen one from its optimum: {data.gap:.2%}"
    return _table(caption, ("plan", "#predicted step", "note"), rows, chosen)


def _table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    marked: Sequence[int] = (),
) -> str:
    """Escaped cells; a head that starts with `#` is a column of numbers."""
    classes = [' class="n"' if head.startswith("#") else "" for head in heads]

    def row(cells: Sequence[str], tag: str, style: str = "") -> str:
        inner = (f"<{tag}{c}>{escaped(t)}</{tag}>" for c, t in zip(classes, cells, strict=True))
        return f"<tr{style}>{''.join(inner)}</tr>"

    lines = [row([head.removeprefix("#") for head in heads], "th")]
    lines += [
        row(cells, "td", ' class="chosen"' if i in marked else "") for i, cells in enumerate(rows)
    ]
    return f"<table>\n<caption>{escaped(caption)}</caption>\n" + "\n".join(lines) + "\n</table>"
