"""search."""

from autopar.passes.search.effort import PlanningStats
from autopar.passes.search.evaluator import depths
from autopar.passes.search.planner import Planner
from autopar.passes.search.simulator import Predict

__all__ = [
    "Planner",
    "PlanningStats",
    "Predict",
    "depths",
]
