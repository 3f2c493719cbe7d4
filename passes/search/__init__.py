"""search."""

from autopar.passes.search.evaluator import depths
from autopar.passes.search.outcome import PlanningResult
from autopar.passes.search.planner import Planner
from autopar.passes.search.pricer import StepPricer
from autopar.passes.search.stats import PlanningStats

__all__ = [
    "Planner",
    "PlanningResult",
    "PlanningStats",
    "StepPricer",
    "depths",
]
