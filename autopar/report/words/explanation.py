"""A plan as text: its stages, placements, collectives, predicted cost and alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.cost.price import HiddenKind
from autopar.plans import PlanData, Predicted
from autopar.program.communication import Collective
from autopar.program.lines import Pipeline, Segment, starred
from autopar.report.blocks import block_set, every_block, modules_of_lines
from autopar.report.division import division
from autopar.report.stages import (
    ParameterTable,
    crossing_rows,
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
    interval_text,
    optimality,
    traffic_rows,
)
from autopar.report.words.assumptions import Remark
from autopar.report.words.legend import legend
from autopar.schedule import in_flight
from autopar.units import format_bytes, format_count, format_seconds

# What every line means, and every term of it.
PAGES = "docs/tutorials/read_a_plan.md", "docs/glossary.md"


def explain(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    collectives: Sequence[Collective],
    verdict: Sequence[str] = (),
    assumed: Sequence[Remark] = (),
    hidden: Sequence[HiddenKind] = (),
    peak_flops_per_s: float | None = None,
) -> str:
    """The text of the whole plan.

    `verdict` comes first. `assumed` is what the prediction takes for granted, and `hidden` how much
    of its communication compute hides. MFU counts `peak_flops_per_s` of every rank.
    """
    several = pipeline.n_stages > 1
    parts = [
        "\n".join(verdict),
        _header(data),
        _stages(pipeline, predicted) if several else "",
        *(
            (f"{table.title}\n" if several else "") + _parameters(table)
            for table in parameter_tables(pipeline)
        ),
        legend(pipeline),
        _comments(data),
        _crossings(pipeline),
        "\n".join(tie_text(pipeline, tie) for tie in pipeline.ties),
        _recomputed(pipeline),
        str(division(pipeline)) if pipeline.n_ranks > 1 else "",
        _communication(collectives, several),
        "\n".join(
            filter(
                None,
                [
                    _prediction(predicted, pipeline, peak_flops_per_s),
                    _schedule_line(data.schedule, pipeline),
                    _hidden(hidden),
                    optimality(data, predicted.step_time_s),
                    *map(str, assumed),
                ],
            )
        ),
        _alternatives(data),
        f"explained in {' and '.join(PAGES)}",
    ]
    return "\n\n".join(part for part in parts if part)


def _header(data: PlanData) -> str:
    return "\n  ".join([headline(data), *idle_warnings(data)])


def _stages(pipeline: Pipeline, predicted: Predicted) -> str:
    rows = stage_rows(pipeline)
    ranks, axes = (max(len(text) for text in column) for column in (
        ["ranks", *(r.ranks for r in rows)], ["mesh", *(r.axes for r in rows)]))  # fmt: skip
    lines = [f"stage  {'ranks':{ranks}}  {'mesh':{axes}}  {'peak':>10}  modules"]
    lines += [
        f"{r.stage:5}  {r.ranks:{ranks}}  {r.axes:{axes}}  {format_bytes(peak_bytes):>10}  "
        f"{r.modules}"
        for r, peak_bytes in zip(rows, predicted.peak_bytes_per_stage, strict=True)
    ]
    return "\n".join(lines)


def _parameters(table: ParameterTable) -> str:
    if not table.rows:
        return "no parameters"
    width, stored, used = (
        max(map(len, column))
        for column in zip(
            ("parameter", "stored", "used"),
            *((r.pattern, r.stored, r.used) for r in table.rows),
            strict=True,
        )
    )
    axes = " ".join(table.axis_names)
    lines = [
        f"{'parameter':{width}}  count  {'stored':{stored}}  {'used':{used}}  shape   (on {axes})"
    ]
    lines += [
        f"{r.pattern:{width}}  {r.count:5}  {r.stored:{stored}}  {r.used:{used}}  {r.shape}"
        + (f"  {r.blocks}" if r.blocks else "")
        for r in table.rows
    ]
    return "\n".join(lines)


def _crossings(pipeline: Pipeline) -> str:
    rows = crossing_rows(pipeline)
    if not rows:
        return ""
    width = max(len(row.value) for row in rows)
    tensor = max(len(row.tensor) for row in rows)
    lines = [
        f"{'crosses':{width}}  stages  {'microbatch':{tensor}}  {'forward':>10}  {'backward':>10}  "
        "sent -> received"
    ]
    for r in rows:
        backward = "-" if r.backward_bytes is None else format_bytes(r.backward_bytes)
        lines.append(
            f"{r.value:{width}}  {r.stages}  {r.tensor:{tensor}}  "
            f"{format_bytes(r.forward_bytes):>10}  {backward:>10}  {r.sent} -> {r.received}"
        )
    return "\n".join(lines)


def _communication(collectives: Sequence[Collective], several_stages: bool) -> str:
    if not collectives:
        return "no communication"
    heads = f"{'phase':13} {'collective':15} {'axis':8} {'calls':>6}  bytes per step and rank"
    lines = [("stage  " if several_stages else "") + heads]
    lines += [
        (f"{r.stage:5}  " if several_stages else "")
        + f"{r.phase:13} {r.kind:15} {r.axis:8} {r.calls:6}  {format_bytes(r.size_bytes)}"
        for r in sorted(traffic_rows(collectives), key=lambda row: row.stage)
    ]
    return "\n".join(lines)


def _interval(predicted: Predicted) -> list[str]:
    """`80% of steps take 7.9 s to 10.9 s`, as published runs lie round their predictions."""
    text = interval_text(predicted)
    return [f"80% of steps take {text}"] if text else []


def _prediction(predicted: Predicted, pipeline: Pipeline, peak_flops_per_s: float | None) -> str:
    words = [
        f"predicted: step {format_seconds(predicted.step_time_s)} "
        f"(compute {format_seconds(predicted.compute_time_s)}, "
        f"communication {format_seconds(predicted.comm_time_s)})",
        *_interval(predicted),
        f"peak {format_bytes(predicted.peak_bytes)} per rank",
    ]
    if pipeline.n_stages > 1:
        ideal = f"{ideal_bubble(pipeline):.1%}"
        words.append(f"bubble {predicted.bubble:.1%} (equal stages, free messages: {ideal})")
    if predicted.tokens_per_s:
        words.append(f"{format_count(predicted.tokens_per_s)} tokens/s")
    if predicted.mfu:
        number, _, prefix = format_count(peak_flops_per_s or 0.0).partition(" ")
        of_peak = f" of {number} {prefix}FLOP/s" if peak_flops_per_s else ""
        words.append(f"MFU {predicted.mfu:.1%}{of_peak}")
    return ", ".join(words)


def _schedule_line(name: str, pipeline: Pipeline) -> str:
    """What another schedule is for: its bubble and its memory beside those of 1f1b."""
    schedule = pipeline.schedule
    if name in ("1f1b", "gpipe") or pipeline.n_stages == 1 or not schedule.trains:
        return ""
    p, m = schedule.n_devices, schedule.n_microbatches
    most = max(in_flight(schedule, device) for device in range(p)) / schedule.n_chunks
    return (
        f"schedule: {name} has a bubble of {ideal_bubble(pipeline):.1%}, 1f1b {p - 1}/{m + p - 1} "
        f"= {(p - 1) / (m + p - 1):.1%} (equal stages, free messages); "
        f"a rank has {most:.3g} microbatches in flight, with 1f1b {min(m, p)}"
    )


def _hidden(kinds: Sequence[HiddenKind]) -> str:
    """How much of each kind of communication runs beside compute, or beside other messages."""
    words = [
        f"{kind.hidden_s / kind.time_s:.0%} of {kind.name} ({format_seconds(kind.time_s)})"
        for kind in kinds
    ]
    return f"hidden: {', '.join(words)}" if words else ""


def _alternatives(data: PlanData) -> str:
    if len(data.alternatives) < 2:
        return ""
    shown, others = alternative_rows(data)
    width = max(len(a.name) for a in shown)
    lines = ["considered"]
    for a in shown:
        mark = "->" if a.name == data.chosen else "  "
        time = "-" if a.step_time_s is None else format_seconds(a.step_time_s)
        lines.append(f" {mark} {a.name:{width}}  {time:>9}  {alternative_note(a, data)}".rstrip())
    return "\n".join([*lines, f"    {others}"] if others else lines)


def _recomputed(pipeline: Pipeline) -> str:
    """The segments that backward recomputes, by mode, and the blocks that they are of."""
    rows, every = [], every_block(pipeline)
    for k, program in enumerate(pipeline.stages):
        by_mode: dict[str, list[Segment]] = {}
        for segment in program.segments:
            by_mode.setdefault(segment.mode, []).append(segment)
        where = f"stage {k}, " if pipeline.n_stages > 1 else ""
        for mode, segments in by_mode.items():
            lines = (line for s in segments for line in program.body[s.start : s.stop])
            text = block_set(modules_of_lines(lines)).text(every)
            rows.append(f"runs again in backward: {where}{len(segments)} in mode {mode}: {text}")
    return "\n".join(rows)


def _comments(data: PlanData) -> str:
    """Remarks on parameters; those of equal layers that say the same are one."""
    counts = Counter((starred(name), starred(text)) for name, text in data.comments.items())
    said = {(starred(n), starred(text)): (n, text) for n, text in data.comments.items()}
    return "\n".join(
        f"{pattern} ({n} parameters): {text}" if n > 1 else ": ".join(said[pattern, text])
        for (pattern, text), n in counts.items()
    )
