"""Weak scaling as a table and as a plot.

The plot has two panels over the number of devices, on a logarithmic axis. The first shows
efficiency, from 0 to 1. The second shows tokens per second, logarithmic too, so that perfect
scaling is a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar.cost.transformer import ScalePoint, Scaling
from autopar.report.picture import FRAME, escaped
from autopar.units import format_bytes, format_count, format_seconds

# All lengths are in user units of the drawing, which is scaled to the page.
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420.0, 260.0, 60.0, 30.0, 90.0
_COLOURS = ("#1f5fa8", "#b3261e", "#2e7d32", "#8a6d3b", "#6a4fa3", "#555555")
_HEADS = (
    "devices", "dp", "batch", "step time", "tokens/s", "efficiency", "compute", "exposed comm",
    "bubble", "peak memory",
)  # fmt: skip


def scaling_text(scalings: Sequence[Scaling]) -> str:
    """A table per machine."""
    return "\n\n".join(_table(scaling) for scaling in scalings)


def _table(scaling: Scaling) -> str:
    rows = [_HEADS, *(_cells(point) for point in scaling.points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    most = max(point.peak_bytes for point in scaling.points)
    if most > scaling.memory_limit_bytes:
        limit = format_bytes(scaling.memory_limit_bytes)
        lines.append(
            f"does not fit: {format_bytes(most)} of {limit} per device; raise --tp, --pp or --zero"
        )
    return "\n".join([scaling.hardware, *lines])


def _cells(point: ScalePoint) -> tuple[str, ...]:
    return (
        str(point.n_devices), str(point.dp), str(point.global_batch),
        format_seconds(point.step_time_s), format_count(point.tokens_per_s),
        f"{point.efficiency:.1%}", format_seconds(point.compute_time_s),
        format_seconds(point.exposed_comm_s), f"{point.bubble:.1%}",
        format_bytes(point.peak_bytes),
    )  # fmt: skip


def scaling_svg(title: str, scalings: Sequence[Scaling]) -> str:
    """A self-contained `<svg>` element, for a page or a file."""
    points = [point for scaling in scalings for point in scaling.points]
    devices = [point.n_devices for point in points]
    rates = [point.tokens_per_s for point in points]
    x = _log_scale(min(devices), max(devices), 0.0, _WIDTH)
    efficiency = _linear_scale(0.0, max(1.0, *(p.efficiency for p in points)), _HEIGHT, 0.0)
    tokens = _log_scale(min(rates), max(rates), _HEIGHT, 0.0)
    right = _LEFT + _WIDTH + _GAP
    width, height = right + _WIDTH + 20, _TOP + _HEIGHT + 50 + 16 * len(scalings)
    shares = [(k / 4, f"{k / 4:.0%}") for k in range(5)]
    decades = [(rate, format_count(rate)) for rate in _powers_of_ten(min(rates), max(rates))]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" '
            f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" '
            'font-size="12">',
            f'<text x="4" y="14" font-weight="bold">{escaped(title)}</text>',
            *_panel(_LEFT, "efficiency", sorted(set(devices)), x, shares, efficiency),
            *_lines(_LEFT, scalings, x, lambda point: efficiency(point.efficiency)),
            *_panel(right, "tokens/s", sorted(set(devices)), x, decades, tokens),
            *_lines(right, scalings, x, lambda point: tokens(point.tokens_per_s)),
            *_legend(scalings),
            "</svg>",
        ]
    )


def _linear_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Maps values from [low, high] to [start, end]; to the middle if `low` equals `high`."""
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    linear = _linear_scale(math.log(low), math.log(high), start, end)
    return lambda value: linear(math.log(value))


def _powers_of_ten(low: float, high: float) -> list[float]:
    """The powers of ten between the two; `low` and `high` if there is none."""
    found = [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    return found or [low, high]


def _panel(
    left: float,
    name: str,
    devices: Sequence[int],
    x: Callable[[float], float],
    ticks: Sequence[tuple[float, str]],
    y: Callable[[float], float],
) -> Iterator[str]:
    """Frame, axes and their ticks."""
    yield (
        f'<rect x="{left:g}" y="{_TOP:g}" width="{_WIDTH:g}" height="{_HEIGHT:g}" fill="none" '
        f'stroke="{FRAME}"/>'
    )
    for value, text in ticks:
        at = _TOP + y(value)
        yield f'<path d="M{left:g} {at:.1f}h{_WIDTH:g}" stroke="#eceff2"/>'
        yield f'<text x="{left - 6:g}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    # At most eight labels, so that they do not overlap.
    for n in devices[:: -(-len(devices) // 8)]:
        yield (
            f'<text x="{left + x(n):.1f}" y="{_TOP + _HEIGHT + 16:g}" text-anchor="middle">{n}'
            "</text>"
        )
    yield (
        f'<text x="{left + _WIDTH / 2:g}" y="{_TOP + _HEIGHT + 34:g}" text-anchor="middle">'
        f"{name} over devices</text>"
    )


def _lines(
    left: float,
    scalings: Sequence[Scaling],
    x: Callable[[float], float],
    y: Callable[[ScalePoint], float],
) -> Iterator[str]:
    """A line with points per machine; the numbers are tooltips."""
    for k, scaling in enumerate(scalings):
        colour = _COLOURS[k % len(_COLOURS)]
        places = [(left + x(p.n_devices), _TOP + y(p), p) for p in scaling.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for a, b, point in places:
            said = (
                f"{point.n_devices} devices: {format_seconds(point.step_time_s)} per step, "
                f"{format_count(point.tokens_per_s)} tokens/s, {point.efficiency:.1%}"
            )
            yield (
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}">'
                f"<title>{escaped(said)}</title></circle>"
            )


def _legend(scalings: Sequence[Scaling]) -> Iterator[str]:
    for k, scaling in enumerate(scalings):
        y = _TOP + _HEIGHT + 50 + 16 * k
        colour = _COLOURS[k % len(_COLOURS)]
        yield f'<rect x="{_LEFT:g}" y="{y:g}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{_LEFT + 18:g}" y="{y + 10:g}">{escaped(scaling.hardware)}</text>'
