"""How long a collective takes: the formula table, compiled to plain float functions.

    time(kind, n, group) = min over the algorithms that the group can run of formula(n, group)
                           x the backend's measured ratio                  (`collective_time_s`)

`LinkGroup.numbers` gives the formulas what they need of a group. gamma defaults to 0, because
bandwidths measured on real collectives already contain the summing. Planning asks about 1e5 times,
so sympy compiles each algorithm once, on first use.

Bus bandwidth, as nccl-tests defines it, is bytes / time x a factor. The factor makes it the speed
of one link in a ring, whatever the number of ranks (`bus_bytes_per_s`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import sympy

from autopar.cost.hardware import LinkGroup
from autopar.cost.laws.formulas import (
    FORMULAS,
    SYMBOLS,
    Formula,
    algorithms,
    require_kind,
    simplify_one_level,
)

# (n, *LinkGroup.numbers, gamma) -> seconds
TimeFunction = Callable[..., float]

# nccl-tests doc/PERFORMANCE.md: a ring sends this many times (p - 1) / p of the buffer.
_BUS_TURNS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

# Enough that the latency is negligible beside their time.
_MANY_BYTES = 1e12


def collective_time_s(
    kind: str, size_bytes: float, group: LinkGroup, gamma_s_per_byte: float = 0.0
) -> float:
    """Seconds of one `kind` over `group`; `size_bytes` is NCCL's size. 0.0 for one rank.

    Raises:
        OptionError: `kind` is no collective.
    """
    candidates = _candidates(kind, group)
    if group.n_ranks == 1:
        return 0.0
    assert size_bytes >= 0, (kind, size_bytes)
    numbers = group.numbers
    least_s = min(time_s(size_bytes, *numbers, gamma_s_per_byte) for _, time_s in candidates)
    return group.slowest.ratio(kind) * least_s


def collective_lines(kind: str, group: LinkGroup) -> tuple[tuple[float, float], ...]:
    """(seconds a, seconds per byte b) of each algorithm that the group can run.

    `collective_time_s` of n bytes is the minimum of a + b n.
    """
    if group.n_ranks == 1:
        return ((0.0, 0.0),)
    numbers, ratio = group.numbers, group.slowest.ratio(kind)
    lines = []
    for name, time_s in _candidates(kind, group):
        one, two = (time_s(n, *numbers, 0.0) for n in (_MANY_BYTES, 2 * _MANY_BYTES))
        none = time_s(0.0, *numbers, 0.0)
        assert math.isclose(two - one, one - none, rel_tol=1e-9), f"{kind} by {name} is no line"
        lines.append((ratio * none, ratio * (one - none) / _MANY_BYTES))
    return tuple(lines)


def cheapest_algorithm(kind: str, size_bytes: float, group: LinkGroup) -> str:
    """The algorithm whose time `collective_time_s` returns; the first of equally fast ones."""
    numbers = group.numbers
    return min(_candidates(kind, group), key=lambda c: c[1](size_bytes, *numbers, 0.0))[0]


def bus_bytes_per_s(kind: str, size_bytes: float, n_ranks: int, time_s: float) -> float:
    """Bus bandwidth as nccl-tests prints it."""
    turns = _BUS_TURNS.get(kind)
    factor = 1.0 if turns is None else turns * (n_ranks - 1) / n_ranks
    return factor * size_bytes / time_s


@dataclass(frozen=True)
class Explained:
    """One algorithm for a group: its formula, and why it is left out (empty if it is not)."""

    algorithm: str
    formula: str
    source: str
    left_out: str
    note: str


def explain(kind: str, group: LinkGroup) -> tuple[Explained, ...]:
    """Every algorithm of `kind`, its formula simplified for `group`."""
    require_kind(kind)
    rows = []
    for name in algorithms(kind):
        entry = FORMULAS[kind, name]
        expression = entry.expression
        if group.is_one_level and entry.placement != "two levels":
            expression = simplify_one_level(expression)
        text = str(expression)
        rows.append(Explained(name, text, entry.source, _left_out(entry, group), entry.note))
    return tuple(rows)


def _left_out(entry: Formula, group: LinkGroup) -> str:
    """Why a group does not use an algorithm; empty if it can."""
    if entry.printed_only:
        return entry.printed_only
    if entry.in_switch and group.in_switch_s_per_byte is None:
        return "no switch that sums links these ranks"
    if entry.placement == "one level" and not group.is_one_level:
        return "the ranks are linked in two ways, inside nodes and across"
    if entry.placement == "two levels" and not group.is_two_levels:
        return "it needs several nodes with equally many ranks in each, and more than one"
    return ""


@lru_cache(maxsize=1 << 12)
def _candidates(kind: str, group: LinkGroup) -> tuple[tuple[str, TimeFunction], ...]:
    require_kind(kind)
    names = [name for name in algorithms(kind) if not _left_out(FORMULAS[kind, name], group)]
    return tuple((name, _compiled(kind, name)) for name in names)


@cache
def _compiled(kind: str, algorithm: str) -> TimeFunction:
    expression = FORMULAS[kind, algorithm].expression
    function: TimeFunction = sympy.lambdify(SYMBOLS, expression, modules="math")
    return function
