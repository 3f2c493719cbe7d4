"""Parts of the reference that are made of the code: the commands' help, the table of profiles.

Nothing here imports Sphinx; `conf.py` has the directives.
"""

from __future__ import annotations

import typer

from autopar.cli import app
from autopar.cost.hardware import available_profiles, load_profile
from autopar.units import format_bytes


def commands_help() -> str:
    """A section for each command, with its help."""
    group = typer.main.get_command(app)
    with group.make_context("autopar", [], resilient_parsing=True) as context:
        parts = []
        for name in group.list_commands(context):  # type: ignore[attr-defined]
            command = group.get_command(context, name)  # type: ignore[attr-defined]
            with command.make_context(name, [], context, resilient_parsing=True) as own:
                own.max_content_width = own.terminal_width = 100
                parts.append(
                    f"### autopar {name}\n\n```text\n{command.get_help(own).rstrip()}\n```\n"
                )
    return "\n".join(parts)


def profiles_table() -> str:
    """Name, memory and peak rates of every shipped profile."""
    titles = ("name", "memory", "bandwidth", "float32", "bfloat16", "a device's port inside a node")
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in available_profiles():
        found = load_profile(name)
        rates = found.rates_flops_per_s(peak=True)
        cells = (
            f"`{name}`",
            format_bytes(found.value("device.memory_bytes")),
            f"{found.value('device.peak_bytes_per_s') / 1e12:.3g} TB/s",
            *(_rate(rates.get(dtype)) for dtype in ("float32", "bfloat16")),
            f"{1e-9 / found.value('link.intra_node.s_per_byte'):.3g} GB/s",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _rate(flops_per_s: float | None) -> str:
    return "" if flops_per_s is None else f"{flops_per_s / 1e12:,.5g} TFLOP/s"
