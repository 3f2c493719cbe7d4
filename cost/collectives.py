"""How long a collective takes: the formula table, compiled to plain float functions.

    time(kind, n, p, link) = min over algorithms valid for p of formula(n, p, alpha, beta, gamma)

with alpha and beta of the link. gamma defaults to 0: bandwidths measured on real collectives
already contain the summing. Planning asks for about 1e5 times, so sympy runs once per
collective, when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy

from autopar.cost.formulas import FORMULAS, SYMBOLS, algorithms, require_kind
from autopar.mesh import Link
from autopar.units import format_seconds

# (p, ceil(log2 p), n, alpha, beta, gamma) -> seconds
TimeFunction = Callable[[int, int, float, float, float, float], float]


def collective_time_s(
    kind: str, size_bytes: float, n_ranks: int, link: Link, gamma_s_per_byte: float = 0.0
) -> float:
    """Seconds of one `kind` of NCCL size `size_bytes` over `n_ranks`; 0.0 for one rank.

    Raises:
        OptionError: `kind` is no collective.
    """
    candidates = _candidates(kind, n_ranks)
    if n_ranks == 1:
        return 0.0
    assert size_bytes >= 0, (kind, size_bytes)
    levels = (n_ranks - 1).bit_length()
    latency_s, s_per_byte = link.latency_s, link.s_per_byte
    return min(
        time_s(n_ranks, levels, size_bytes, latency_s, s_per_byte, gamma_s_per_byte)
        for _, time_s in candidates
    )


def cheapest_algorithm(kind: str, size_bytes: float, n_ranks: int, link: Link) -> str:
    """The algorithm whose time `collective_time_s` returns; the first one among equals."""
    levels = (n_ranks - 1).bit_length()
    return min(
        _candidates(kind, n_ranks),
        key=lambda c: c[1](n_ranks, levels, size_bytes, link.latency_s, link.s_per_byte, 0.0),
    )[0]


def explain(
    kind: str, n_ranks: int, size_bytes: float | None = None, link: Link | None = None
) -> str:
    """Every formula of `kind` with its source, and whether it counts for `n_ranks`.

    With a size and a link, the times too.
    """
    require_kind(kind)
    counted = algorithms(kind, n_ranks)
    lines = [f"{kind} over {n_ranks} ranks: the least of {', '.join(counted)}"]
    levels = (n_ranks - 1).bit_length()
    for name in algorithms(kind):
        entry = FORMULAS[kind, name]
        line = f"  {name}: {entry.expression}"
        if size_bytes is not None and link is not None:
            time_s = _compiled(kind, name)(
                n_ranks, levels, size_bytes, link.latency_s, link.s_per_byte, 0.0
            )
            line += f" = {format_seconds(time_s)}"
        lines.append(line)
        if entry.printed_only:
            lines.append(f"    {entry.printed_only}")
        elif name not in counted:
            lines.append(f"    not in the minimum: {n_ranks} is not a power of two")
        lines.append(f"    source: {entry.source}")
    lines.append("  p ranks, L = ceil(log2 p), n bytes, alpha s, beta and gamma s per byte")
    return "\n".join(lines)


@cache
def _candidates(kind: str, n_ranks: int) -> tuple[tuple[str, TimeFunction], ...]:
    require_kind(kind)
    assert n_ranks >= 1, n_ranks
    return tuple((name, _compiled(kind, name)) for name in algorithms(kind, n_ranks))


@cache
def _compiled(kind: str, algorithm: str) -> TimeFunction:
    expression = FORMULAS[kind, algorithm].expression
    function: TimeFunction = sympy.lambdify(SYMBOLS, expression, modules="math")
    return function
