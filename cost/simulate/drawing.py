"""A simulated step as an SVG: a row per device, time from left to right.

Each row shows the device's compute on top, then in thin lanes its collectives and its messages.
The width of a box is its duration. Its tooltip gives its name and time; the name is also in the box
if there is room.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence

from autopar.cost.simulate.events import Event, Lane
from autopar.units import format_seconds

# Lengths are in user units of the drawing; the page scales them.
_WIDTH, _MARGIN = 1000.0, 60.0
_ROW, _LETTER = 50.0, 7.0
_LANES: Mapping[Lane, tuple[float, float]] = {
    "compute": (0.0, 24.0), "collectives": (26.0, 7.0), "p2p": (35.0, 7.0),
}  # fmt: skip
_FRAME = "#9aa5b1"
_COMPUTE = re.compile(r"\d+([FBIW])\d+")
_COLOURS = {
    "forward": "#a9cdf5", "backward": "#f6cf9b", "gradients of weights": "#cfe3b4",
    "collectives": "#8a6d3b", "messages": "#b3261e",
    "once a step (parameters, gradients, loss, optimizer)": "#c9ced6",
}  # fmt: skip
_WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "gradients of weights"}


def svg(idle_s: Mapping[str, float], events: Sequence[Event], step_time_s: float) -> str:
    """A self-contained `<svg>` element; `idle_s` by the name of each device."""
    height = len(idle_s) * _ROW + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" '
            f'viewBox="0 0 {_MARGIN + _WIDTH + 10:g} {height:g}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="12">',
            *_rows(idle_s, step_time_s),
            *(_box(event, step_time_s) for event in events),
            *_foot(step_time_s, len(idle_s) * _ROW),
            "</svg>",
        ]
    )


def _rows(idle_s: Mapping[str, float], step_time_s: float) -> Iterator[str]:
    height = _LANES["compute"][1]
    for i, (name, time_s) in enumerate(idle_s.items()):
        y = i * _ROW
        idle = time_s / step_time_s if step_time_s else 0.0
        yield f'<text x="0" y="{y + 14:g}">{html.escape(name)}</text>'
        yield f'<text x="0" y="{y + 28:g}" fill="#666" font-size="10">idle {idle:.0%}</text>'
        yield (
            f'<rect x="{_MARGIN:g}" y="{y:g}" width="{_WIDTH:g}" height="{height:g}" '
            f'fill="none" stroke="{_FRAME}" stroke-width="0.5"/>'
        )


def _box(event: Event, step_time_s: float) -> str:
    """The box of an event with its tooltip, and its name if there is room."""
    scale = _WIDTH / step_time_s if step_time_s else 0.0
    x, width = _MARGIN + event.start_s * scale, (event.end_s - event.start_s) * scale
    top, height = _LANES[event.lane]
    y = event.device * _ROW + top
    time = f"{format_seconds(event.end_s - event.start_s)} from {format_seconds(event.start_s)}"
    box = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="{_COLOURS[_kind(event)]}" stroke="white" stroke-width="0.5">'
        f"<title>{html.escape(f'{event.action}: {time}')}</title></rect>"
    )
    if event.lane != "compute" or len(event.action) * _LETTER > width:
        return box
    return (
        f'{box}<text x="{x + width / 2:.2f}" y="{y + 16:g}" text-anchor="middle" '
        f'pointer-events="none">{html.escape(event.action)}</text>'
    )


def _kind(event: Event) -> str:
    if event.lane == "p2p":
        return "messages"
    if event.lane == "collectives":
        return "collectives"
    found = _COMPUTE.fullmatch(event.action)
    if found is None:
        return "once a step (parameters, gradients, loss, optimizer)"
    return _WORDS[found[1]]


def _foot(step_time_s: float, y: float) -> Iterator[str]:
    """The two ends of the time axis, and the legend of colours."""
    yield f'<text x="{_MARGIN:g}" y="{y + 10:g}">0 s</text>'
    yield (
        f'<text x="{_MARGIN + _WIDTH:g}" y="{y + 10:g}" text-anchor="end">'
        f"{format_seconds(step_time_s)}</text>"
    )
    x = _MARGIN
    for word, colour in _COLOURS.items():
        yield f'<rect x="{x:g}" y="{y + 22:g}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:g}" y="{y + 32:g}">{word}</text>'
        x += 40 + len(word) * _LETTER
