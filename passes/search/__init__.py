"""Which plan is the fastest: best-first branch and bound over sets of plans.

Reading order: `branch_bound.py` (the algorithm), `planner.py` (the space of plans), `levels.py`
(the bounds of one stage), `recipes.py` (plain plans), `contexts.py` (an axis cp),
`several_stages.py` (pipelines), `simplicity.py` (which of equals), `time_limit.py` (when it ends
early), `evaluator.py` (solves), `simulator.py` (lowers and simulates), `slower.py` (why others are
slower), `axis_names.py` (cp),
`outcome.py` and `stats.py` (the result).
May import `passes/inter`, `lowering`, the rooms below them, and what lies below `passes`.
Mainly hands on `Planner` and `PlanningResult`.
"""

from autopar.passes.search.evaluator import Evaluator, Proposal, depths
from autopar.passes.search.outcome import PlanningResult
from autopar.passes.search.planner import Planner
from autopar.passes.search.simulator import Simulator, Solved
from autopar.passes.search.slower import WhySlower
from autopar.passes.search.stats import PlanningStats

__all__ = [
    "Evaluator",
    "Planner",
    "PlanningResult",
    "PlanningStats",
    "Proposal",
    "Simulator",
    "Solved",
    "WhySlower",
    "depths",
]
