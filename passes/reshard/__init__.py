"""The cheapest way to change a tensor from one spec to another, for every pair of its specs.

Reading order: `move_graph.py` (specs and single moves as a graph), `primitive_costs.py` (seconds of
the moves), `paths.py` (shortest paths), `costs.py` (tables of the cheapest reshards) and
`spec_column.py` (the specs of a variable's choices).
May import the solvers and everything below `passes`, but not `passes/analysis`.
Mainly hands on `reshard_tables`, `ReshardTable` and `SpecColumn`.
"""

from autopar.passes.reshard.costs import (
    ReshardTable,
    ReshardTables,
    canonical_cost,
    reshard_table,
    reshard_tables,
)
from autopar.passes.reshard.move_graph import MoveStep, moves_from, step_time_s
from autopar.passes.reshard.paths import Ties
from autopar.passes.reshard.primitive_costs import primitive_lines
from autopar.passes.reshard.spec_column import SpecColumn, SpecColumns, all_alike

__all__ = [
    "MoveStep",
    "ReshardTable",
    "ReshardTables",
    "SpecColumn",
    "SpecColumns",
    "Ties",
    "all_alike",
    "canonical_cost",
    "moves_from",
    "primitive_lines",
    "reshard_table",
    "reshard_tables",
    "step_time_s",
]
