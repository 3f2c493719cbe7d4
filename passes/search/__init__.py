"""Which plan is the fastest: candidates are proposed, solved, scored and simulated.

Reading order: `planner.py` (the order of the search), `proposals.py` (candidates that need no
stage search), `refined.py` (the joint search, corrected by solving), `count_search.py` (the number
of microbatches), `evaluator.py` (solves and scores), `simulator.py` (lowers and simulates),
`slower.py` (why others are slower), `outcome.py` and `stats.py` (the result).
May import `passes/inter`, `lowering`, the rooms below them, and what lies below `passes`.
Hands on `Planner`, `PlanningResult` and `StepPricer`.
"""

from autopar.passes.search.evaluator import depths
from autopar.passes.search.outcome import PlanningResult
from autopar.passes.search.planner import Planner
from autopar.passes.search.simulator import StepPricer
from autopar.passes.search.stats import PlanningStats

__all__ = [
    "Planner",
    "PlanningResult",
    "PlanningStats",
    "StepPricer",
    "depths",
]
