"""laws."""

from autopar.cost.laws.collectives import (
    Explained,
    bus_bytes_per_s,
    cheapest_algorithm,
    collective_time_s,
    explain,
)
from autopar.cost.laws.compute import Kind, op_time_s
from autopar.cost.laws.formulas import LEGEND, require_kind
from autopar.cost.laws.model import CostModel

__all__ = [
    "LEGEND",
    "CostModel",
    "Explained",
    "Kind",
    "bus_bytes_per_s",
    "cheapest_algorithm",
    "collective_time_s",
    "explain",
    "op_time_s",
    "require_kind",
]
