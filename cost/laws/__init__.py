"""The cost laws: how long a collective or an operator takes, from sizes and hardware alone.

Read `formulas.py` (one symbolic formula per collective and algorithm), then `collectives.py` (the
formulas as functions, and the fastest algorithm of a group), and `model.py` (a roofline for
operators; both laws on the mesh of one stage).

The room may import `hardware` and what lies below `cost`; not `memory` or `simulate`, which are
its neighbours. It mainly hands on `CostModel`, `collective_time_s` and `op_time_s`.
"""

from autopar.cost.laws.collectives import (
    Explained,
    bus_bytes_per_s,
    cheapest_algorithm,
    collective_time_s,
    explain,
)
from autopar.cost.laws.formulas import KINDS, LEGEND, algorithms, require_kind
from autopar.cost.laws.model import CostModel, Kind, op_time_s

__all__ = [
    "KINDS",
    "LEGEND",
    "CostModel",
    "Explained",
    "Kind",
    "algorithms",
    "bus_bytes_per_s",
    "cheapest_algorithm",
    "collective_time_s",
    "explain",
    "op_time_s",
    "require_kind",
]
