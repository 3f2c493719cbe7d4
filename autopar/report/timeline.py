"""The simulated step as an SVG: a row per stage, time from left to right.

Above, what the stage does; below, thin, what it sends. A box is as wide as it takes, its
name and time are its tooltip, and its name is in it where there is room.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.cost.simulate import Event, Timeline
from autopar.report.boxes import FRAME, escaped
from autopar.units import format_seconds

# All lengths are in user units of the drawing, which is scaled to the page.
_WIDTH, _MARGIN = 1000.0, 60.0
_ROW, _WORK, _SENDS = 44.0, 24.0, 8.0
_LETTER = 7.0
_COMPUTE = re.compile(r"\d+([FB]\d+)")
COLOURS = {
    "forward": "#a9cdf5", "backward": "#f6cf9b", "messages": "#b3261e",
    "once a step (parameters, gradients, loss, optimizer)": "#c9ced6",
}  # fmt: skip


def timeline_svg(timeline: Timeline) -> str:
    """An `<svg>` element that stands for itself, for a page or a file."""
    n_stages = len(timeline.devices)
    height = n_stages * _ROW + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" '
            f'viewBox="0 0 {_MARGIN + _WIDTH + 10:g} {height:g}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            *_rows(timeline, n_stages),
            *(_event(event, timeline.step_time_s) for event in timeline.events),
            *_foot(timeline.step_time_s, n_stages * _ROW),
            "</svg>",
        ]
    )


def _rows(timeline: Timeline, n_stages: int) -> Iterator[str]:
    for stage in range(n_stages):
        y = stage * _ROW
        idle = timeline.idle_s(stage) / timeline.step_time_s if timeline.step_time_s else 0.0
        yield f'<text x="0" y="{y + 14:g}">stage {stage}</text>'
        yield f'<text x="0" y="{y + 28:g}" fill="#666" font-size="10">idle {idle:.0%}</text>'
        yield (
            f'<rect x="{_MARGIN:g}" y="{y:g}" width="{_WIDTH:g}" height="{_WORK:g}" '
            f'fill="none" stroke="{FRAME}" stroke-width="0.5"/>'
        )


def _event(event: Event, step_time_s: float) -> str:
    """A box, with its tooltip and perhaps its name."""
    scale = _WIDTH / step_time_s if step_time_s else 0.0
    x, width = _MARGIN + event.start_s * scale, (event.end_s - event.start_s) * scale
    y = event.device * _ROW + (_WORK + 2 if event.is_message else 0)
    time = f"{format_seconds(event.end_s - event.start_s)} from {format_seconds(event.start_s)}"
    box = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" '
        f'height="{_SENDS if event.is_message else _WORK:g}" fill="{COLOURS[_kind(event)]}" '
        f'stroke="white" stroke-width="0.5"><title>{escaped(f"{event.action}: {time}")}</title>'
        "</rect>"
    )
    name = _COMPUTE.sub(r"\1", event.action)
    if event.is_message or len(name) * _LETTER > width:
        return box
    return (
        f'{box}<text x="{x + width / 2:.2f}" y="{y + 16:g}" text-anchor="middle" '
        f'pointer-events="none">{escaped(name)}</text>'
    )


def _kind(event: Event) -> str:
    if event.is_message:
        return "messages"
    found = _COMPUTE.fullmatch(event.action)
    if found is None:
        return "once a step (parameters, gradients, loss, optimizer)"
    return "forward" if found[1].startswith("F") else "backward"


def _foot(step_time_s: float, y: float) -> Iterator[str]:
    """The two ends of the time axis, and what the colours mean."""
    yield f'<text x="{_MARGIN:g}" y="{y + 10:g}">0 s</text>'
    yield (
        f'<text x="{_MARGIN + _WIDTH:g}" y="{y + 10:g}" text-anchor="end">'
        f"{format_seconds(step_time_s)}</text>"
    )
    x = _MARGIN
    for word, colour in COLOURS.items():
        yield f'<rect x="{x:g}" y="{y + 22:g}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:g}" y="{y + 32:g}">{word}</text>'
        x += 40 + len(word) * _LETTER
