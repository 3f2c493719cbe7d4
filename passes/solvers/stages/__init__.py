"""Cuts a model into pipeline stages, and gives each stage a configuration.

Read `clustering.py` (operators into layers), `problem.py` (the objective and the constraints),
`brute_force.py` (all plans enumerated), `tables.py` (the recurrence for given limits), `search.py`
(branch and bound over the limits). May import `passes/solvers/problem`. Hands on
`cluster_operators`, `StageProblem`, `solve_stages` and `least_span_s`.
"""

from autopar.passes.solvers.stages.clustering import cluster_operators, least_flops
from autopar.passes.solvers.stages.problem import StagePlan, StageProblem
from autopar.passes.solvers.stages.search import solve_stages
from autopar.passes.solvers.stages.tables import least_span_s

__all__ = [
    "StagePlan",
    "StageProblem",
    "cluster_operators",
    "least_flops",
    "least_span_s",
    "solve_stages",
]
