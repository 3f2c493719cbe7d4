"""reshard."""

from autopar.passes.reshard.costs import (
    ReshardTable,
    ReshardTables,
    priced_alike,
    reshard_table,
    reshard_tables,
)
from autopar.passes.reshard.move_graph import MoveStep, step_time_s
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
    "priced_alike",
    "primitive_lines",
    "reshard_table",
    "reshard_tables",
    "step_time_s",
]
