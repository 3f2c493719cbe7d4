"""`autopar cost`: what a collective costs, why, and by which algorithm at each size.

Prints every formula with its source, and whether the group can run it. Then the values of the
symbols on the given hardware. Then, by size, the fastest algorithm, its time and its bus bandwidth.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from autopar.cli.shell import Result
from autopar.cost.hardware import LinkGroup, detect, even_group, load_profile
from autopar.cost.laws import (
    LEGEND,
    Explained,
    bus_bytes_per_s,
    cheapest_algorithm,
    collective_time_s,
    explain,
    require_kind,
)
from autopar.errors import OptionError
from autopar.mesh import Link
from autopar.units import format_bytes, format_seconds

SIZES_BYTES = tuple(4**k for k in range(5, 16))  # 1 KiB to 1 GiB
_WIDTH = 100


@dataclass(frozen=True)
class SizeRow:
    """The fastest algorithm at one size."""

    size_bytes: int
    algorithm: str
    time_s: float
    bus_bytes_per_s: float


def cost_result(
    kind: str,
    n_ranks: int,
    n_nodes: int,
    hardware: str | None,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> Result:
    """Explain and price `kind` over ranks spread evenly over nodes of a hardware profile."""
    require_kind(kind)
    if n_ranks < 2 or n_nodes < 1 or n_ranks % n_nodes:
        raise OptionError(
            f"{n_ranks} ranks on {n_nodes} nodes",
            hint="give at least 2 ranks, and equally many on each node",
        )
    if min(sizes_bytes) < 1:
        raise OptionError(f"a size of {min(sizes_bytes)} bytes", hint="write --size 256MiB")
    profile = load_profile(hardware or detect())
    inside, across = profile.link("intra_node"), profile.link("inter_node")
    group = even_group(n_ranks, n_ranks // n_nodes, inside, across)
    explained = explain(kind, group)
    rows = [_row(kind, size_bytes, group) for size_bytes in sizes_bytes]
    place = f"in one node of {profile.name}"
    if n_nodes > 1:
        place = f"{group.per_node} in each of {n_nodes} nodes of {profile.name}"
    text = "\n".join(
        [
            f"{kind} of {n_ranks} ranks, {place}",
            "",
            *(line for found in explained for line in _algorithm_lines(found)),
            *_legend_lines(group),
            "",
            *_table_lines(rows),
        ]
    )
    data = {
        "kind": kind,
        "hardware": profile.name,
        "n_ranks": n_ranks,
        "n_nodes": n_nodes,
        "links": {"inside": asdict(inside), "across": asdict(across)},
        "symbols": LEGEND,
        "algorithms": [asdict(found) for found in explained],
        "times": [asdict(row) for row in rows],
    }
    return Result(text, data)


def _row(kind: str, size_bytes: int, group: LinkGroup) -> SizeRow:
    time_s = collective_time_s(kind, size_bytes, group)
    bandwidth = bus_bytes_per_s(kind, size_bytes, group.n_ranks, time_s)
    return SizeRow(size_bytes, cheapest_algorithm(kind, size_bytes, group), time_s, bandwidth)


def _algorithm_lines(found: Explained) -> list[str]:
    lines = [f"{found.algorithm}: {found.formula}"]
    remarks = {"not counted": found.left_out, "note": found.note, "source": found.source}
    for name, remark in remarks.items():
        if remark:
            lines += textwrap.wrap(
                f"{name}: {remark}", _WIDTH, initial_indent="  ", subsequent_indent="    "
            )
    return [*lines, ""]


def _legend_lines(group: LinkGroup) -> list[str]:
    """The symbols, and their values for this group."""
    slowest, inside, switch = group.slowest, group.inside, group.in_switch_s_per_byte
    here = {
        "p": str(group.n_ranks),
        "N": str(group.n_nodes),
        "g": str(group.per_node),
        "alpha, beta": _link_text(slowest),
        "alpha_in, beta_in": _link_text(inside),
        "sigma": "none" if switch is None else f"1 / ({1e-9 / switch:.4g} GB/s)",
        "gamma": "0, because measured bandwidths include it",
    }
    width = max(map(len, LEGEND))
    lines = []
    for symbol, meaning in LEGEND.items():
        value = f"; here {here[symbol]}" if symbol in here else ""
        lines.append(f"{symbol:{width}}  {meaning}{value}")
    return lines


def _link_text(link: Link) -> str:
    rate = "no time" if link.s_per_byte == 0 else f"1 / ({1e-9 / link.s_per_byte:.4g} GB/s)"
    return f"{format_seconds(link.latency_s)}, {rate}"


def _table_lines(rows: Sequence[SizeRow]) -> list[str]:
    width = max(len(row.algorithm) for row in rows)
    head = f"{'size':>11}  {'algorithm':{width}}  {'time':>8}  {'bus bandwidth':>14}"
    return [
        head,
        *(
            f"{format_bytes(row.size_bytes):>11}  {row.algorithm:{width}}  "
            f"{format_seconds(row.time_s):>8}  {row.bus_bytes_per_s / 1e9:>9.3g} GB/s"
            for row in rows
        ),
    ]
