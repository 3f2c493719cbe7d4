"""A simulated step as text: where each stage spends its time, and what other machines change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost.simulate import Timeline
from autopar.units import format_bytes, format_seconds

_HEADS = (
    "", "compute", "collectives", "hidden", "waits", "optimizer", "idle", "sends", "peak memory",
)  # fmt: skip


def simulation_text(timeline: Timeline) -> str:
    """A summary of the step, and a row per stage."""
    rows = [_HEADS, *(_stage_row(timeline, k) for k in range(len(timeline.devices)))]
    return "\n".join(
        [
            f"step {format_seconds(timeline.step_time_s)}: compute "
            f"{format_seconds(timeline.compute_time_s)}, communication "
            f"{format_seconds(timeline.comm_time_s)} (not hidden "
            f"{format_seconds(timeline.exposed_comm_s)}), bubble {timeline.bubble:.1%}",
            "",
            *_aligned(rows),
            "collectives: not overlapped; hidden: overlapped collectives; waits: for messages; "
            "sends: time of messages, overlapped or not",
        ]
    )


def _stage_row(timeline: Timeline, device: int) -> tuple[str, ...]:
    totals = timeline.devices[device]
    times_s = (
        totals.compute_s, totals.collectives_s, totals.hidden_s, totals.waited_s, totals.update_s,
        timeline.idle_s(device), totals.sending_s,
    )  # fmt: skip
    name, peak = timeline.names()[device], format_bytes(timeline.peak_bytes(device))
    return name, *map(format_seconds, times_s), peak


def simulation_dict(timeline: Timeline) -> dict[str, Any]:
    """The same as plain data."""
    stages = [
        {
            "name": name, "n_ranks": totals.n_ranks, "compute_s": totals.compute_s,
            "collectives_s": totals.collectives_s, "hidden_s": totals.hidden_s,
            "waited_s": totals.waited_s, "optimizer_s": totals.update_s,
            "idle_s": timeline.idle_s(k), "sending_s": totals.sending_s,
            "peak_bytes": timeline.peak_bytes(k),
        }
        for k, (name, totals) in enumerate(zip(timeline.names(), timeline.devices, strict=True))
    ]  # fmt: skip
    return _step_dict(timeline) | {"stages": stages}


def what_if_text(base: Timeline, others: Mapping[str, Timeline]) -> str:
    """The step on other machines, beside the machine it was planned for."""
    rows = [("what if", "step time", "relative", "compute", "not hidden", "bubble")]
    for name, timeline in {"as it is": base, **others}.items():
        share = timeline.step_time_s / base.step_time_s if base.step_time_s else 1.0
        rows.append(
            (
                name, format_seconds(timeline.step_time_s), f"{share:.1%}",
                format_seconds(timeline.compute_time_s), format_seconds(timeline.exposed_comm_s),
                f"{timeline.bubble:.1%}",
            )
        )  # fmt: skip
    return "\n".join(_aligned(rows))


def what_if_dict(others: Mapping[str, Timeline]) -> list[dict[str, Any]]:
    return [{"what_if": name} | _step_dict(timeline) for name, timeline in others.items()]


def _step_dict(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_time_s": timeline.step_time_s,
        "compute_time_s": timeline.compute_time_s,
        "comm_time_s": timeline.comm_time_s,
        "exposed_comm_s": timeline.exposed_comm_s,
        "bubble": timeline.bubble,
    }


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                f"{row[0]:{widths[0]}}",
                *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
