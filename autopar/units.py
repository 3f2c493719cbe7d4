"""Text of quantities and of ranks. Values are in SI units; only printed text has prefixes."""

from __future__ import annotations

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_bytes(size_bytes: float) -> str:
    """`1536` -> `"1.5 KiB"`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(value, 1)) < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def format_bytes_of(size_bytes: float, limit_bytes: float) -> str:
    """`"56.5 of 72.0 GiB"`; each has its own unit where they differ."""
    size, limit = format_bytes(size_bytes), format_bytes(limit_bytes)
    number, unit = size.split()
    return f"{number if limit.endswith(f' {unit}') else size} of {limit}"


def format_seconds(time_s: float) -> str:
    """`0.00123` -> `"1.23 ms"`."""
    return "0 s" if time_s == 0.0 else _three_digits(time_s, _SECONDS)


def format_count(value: float) -> str:
    """`1.5e9` -> `"1.5 G"`."""
    return _three_digits(value, _COUNTS)


def format_ranks(ranks: Sequence[int]) -> str:
    """`[3]` -> `"rank 3"`, `[0, 1]` -> `"ranks 0, 1"`; at most eight are named."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _three_digits(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """`value` to three digits, in the largest unit that is not above it; else the smallest."""
    # Round before choosing the unit: 0.9999 s is 1 s, not 1e+03 ms.
    rounded = float(f"{value:.3g}")
    scale, unit = next((s for s in scales if abs(rounded) >= s[0]), scales[-1])
    scaled = value / scale
    digits = f"{scaled:.0f}" if abs(scaled) >= 999.5 else f"{scaled:.3g}"
    return f"{digits} {unit}".rstrip()
