"""planning."""

from autopar.planning.bound import Bound
from autopar.planning.plan import Plan, plan_program, planned, settled_heap

__all__ = [
    "Bound",
    "Plan",
    "plan_program",
    "planned",
    "settled_heap",
]
