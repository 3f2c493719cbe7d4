"""What the table of parameters abbreviates, explained where it occurs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.program.lines import Pipeline
from autopar.report.tables import ParameterRow, parameter_rows

# What a cell has -> its meaning, in the order of the legend.
_CELLS = {
    r"S\(": "S(d)  sharded along dim d; S(d.k) along factor k of dim d",
    r"\bR\b": "R  whole on every rank, and each has its own gradient: they are summed",
    r"\bI\b": "I  whole on every rank, with equal gradients",
    r"\bP\b": "P  the value is the sum over ranks",
    r" micro$": "micro  gathered once a step; gradients scattered after each microbatch (ZeRO-2)",
    r"each use": "each use  gathered by each operator that uses it, and freed (ZeRO-3)",
}


def legend(pipeline: Pipeline) -> str:
    """One line for each abbreviation in the tables of parameters."""
    rows = [row for program in pipeline.stages for row in parameter_rows(program)]
    return "\n".join([*_starred(rows), *_cells(rows), *_orders(pipeline, rows)])


def _starred(rows: list[ParameterRow]) -> Iterator[str]:
    if any("*" in row.pattern for row in rows):
        yield "*  every block; `count` says how many there are"


def _cells(rows: list[ParameterRow]) -> Iterator[str]:
    cells = {cell for row in rows for cell in (row.stored, row.used)}
    for pattern, meaning in _CELLS.items():
        if any(re.search(pattern, cell) for cell in cells):
            yield meaning


def _orders(pipeline: Pipeline, rows: list[ParameterRow]) -> Iterator[str]:
    """`order 1,0`: which axis cuts a dim first that several shard."""
    names = max((program.axis_names for program in pipeline.stages), key=len)
    found = dict.fromkeys(
        match for row in rows for match in re.findall(r"order ([0-9,]+)", row.stored + row.used)
    )
    for order in found:
        axes = [names[int(axis)] for axis in order.split(",")]
        yield f"order {order}  {axes[0]} cuts the dim first, then {', then '.join(axes[1:])}"
