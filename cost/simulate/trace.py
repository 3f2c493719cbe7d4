"""A simulated step as a Chrome trace: a process per device with its memory, a thread per lane.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(Trace Event Format). Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autopar.cost.simulate.events import LANES, Event

_US_PER_S = 1e6


def chrome_trace(
    names: Sequence[str],
    events: Sequence[Event],
    memory: Sequence[Sequence[tuple[float, float]]],
) -> str:
    """JSON for chrome://tracing or Perfetto; `memory` of each device as (time_s, size_bytes)."""
    entries = [*_names(names), *map(_span, events), *_counters(memory)]
    return json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"})


def _names(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for pid, name in enumerate(names):
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
        for tid, lane in enumerate(LANES):
            args = {"name": lane}
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": args}


def _span(event: Event) -> dict[str, Any]:
    return {
        "name": event.action, "ph": "X", "pid": event.device, "tid": LANES.index(event.lane),
        "ts": event.start_s * _US_PER_S, "dur": (event.end_s - event.start_s) * _US_PER_S,
    }  # fmt: skip


def _counters(memory: Sequence[Sequence[tuple[float, float]]]) -> Iterator[dict[str, Any]]:
    """The memory of each device over time; nothing for devices without known bytes."""
    for pid, points in enumerate(memory):
        if any(size_bytes for _, size_bytes in points):
            for time_s, size_bytes in points:
                args = {"bytes": size_bytes}
                ts = time_s * _US_PER_S
                yield {"name": "memory", "ph": "C", "pid": pid, "ts": ts, "args": args}
