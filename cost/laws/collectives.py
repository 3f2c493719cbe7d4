"""How long a collective takes: the formula table, compiled to plain float functions.

    time(kind, n, group) = min over the algorithms that the group can run of formula(n, group)
                           x the backend's measured ratio                  (`collective_time_s`)

Inside a node whose profile says so (`Link.chunk_s`), a collective cuts its buffer in chunks that
pass the ranks like a pipeline. With k chunks over S steps of an algorithm that takes a + b n whole,

    L + S c r + (1 + 1/r) b n        r = k / S, c = chunk_s, L = the least latency of any algorithm

The best r grows with n, so bandwidth is reached slowly: on 8 A100s, an all_reduce of 16 MiB has
half of that of 8 GiB. Powers of two for r are within 3% of the best (`_in_chunks`).

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

# Kinds with a ring, whose chunks follow each other. The switch has 7 steps (`formulas.py`).
_CHUNKED, _SWITCH_STEPS = ("all_reduce", "all_gather", "reduce_scatter"), 7
_CHUNKS_PER_STEP = tuple(2.0**i for i in range(-2, 9))

# Enough that the latency is negligible beside their time.
_MANY_BYTES = 1e12


def collective_time_s(
    kind: str,
    size_bytes: float,
    group: LinkGroup,
    gamma_s_per_byte: float = 0.0,
    *,
    algorithm: str | None = None,
) -> float:
    """Seconds of one `kind` over `group`; `size_bytes` is NCCL's size. 0.0 for one rank.

    Given an `algorithm`, its time.

    Raises:
        OptionError: `kind` is no collective.
    """
    if group.n_ranks == 1:
        require_kind(kind)
        return 0.0
    assert size_bytes >= 0, (kind, size_bytes)
    if algorithm is None and _passes_chunks(kind, group):
        return min(a + b * size_bytes for a, b in collective_lines(kind, group))
    candidates = _candidates(kind, group)
    if algorithm is not None:
        candidates = tuple(c for c in candidates if c[0] == algorithm)
    numbers = group.numbers
    least_s = min(time_s(size_bytes, *numbers, gamma_s_per_byte) for _, time_s in candidates)
    return group.slowest.ratio(kind) * least_s


@lru_cache(maxsize=1 << 12)
def collective_lines(kind: str, group: LinkGroup) -> tuple[tuple[float, float], ...]:
    """(seconds a, seconds per byte b) of each algorithm that the group can run.

    `collective_time_s` of n bytes is the minimum of a + b n.
    """
    if group.n_ranks == 1:
        return ((0.0, 0.0),)
    if _passes_chunks(kind, group):
        return _in_chunks(kind, group)
    return tuple(line for _, line in _whole_lines(kind, group))


def _passes_chunks(kind: str, group: LinkGroup) -> bool:
    """Whether a collective runs in chunks: on one node that says so, where a ring is."""
    return group.n_nodes == 1 and group.inside.chunk_s is not None and kind in _CHUNKED


def _in_chunks(kind: str, group: LinkGroup) -> tuple[tuple[float, float], ...]:
    """Lines of a ring, or of the summing switch, with few to many chunks."""
    whole = dict(_whole_lines(kind, group))
    chunk_s, ratio = group.inside.chunk_s or 0.0, group.slowest.ratio(kind)
    least_s = min(a for a, _ in whole.values())
    n_steps = {"ring": _BUS_TURNS[kind] * (group.n_ranks - 1), "in_switch": _SWITCH_STEPS}
    return tuple(
        (least_s + ratio * n_steps[name] * chunk_s * r, b * (1 + 1 / r))
        for name, (_, b) in whole.items()
        if name in n_steps
        for r in _CHUNKS_PER_STEP
    )


def _whole_lines(kind: str, group: LinkGroup) -> tuple[tuple[str, tuple[float, float]], ...]:
    """(seconds a, seconds per byte b) of each algorithm, by name, on whole buffers."""
    numbers, ratio = group.numbers, group.slowest.ratio(kind)
    lines = []
    for name, time_s in _candidates(kind, group):
        one, two = (time_s(n, *numbers, 0.0) for n in (_MANY_BYTES, 2 * _MANY_BYTES))
        none = time_s(0.0, *numbers, 0.0)
        assert math.isclose(two - one, one - none, rel_tol=1e-9), f"{kind} by {name} is no line"
        lines.append((name, (ratio * none, ratio * (one - none) / _MANY_BYTES)))
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
