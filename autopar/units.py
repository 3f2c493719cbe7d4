"""Printing quantities: SI inside, pretty units only where text is shown."""

from __future__ import annotations


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `"1.5 KiB"`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def format_seconds(time_s: float) -> str:
    """`0.00123` -> `"1.23 ms"`."""
    if time_s == 0.0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.3g} {unit}"
    return f"{time_s / 1e-9:.3g} ns"


def format_count(value: float) -> str:
    """`1.5e9` -> `"1.5 G"`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"
