"""Cuts a model into pipeline stages, and gives each stage a configuration.

Read `clustering.py` (operators into layers), `problem.py` (stages, and the span of a plan),
`recurrence.py` (the least span), `listing.py` (plans best first). May import
`passes/solvers/problem`. Mainly hands on `cluster_operators`, `StageProblem`, `CostToGo`,
`least_span_s`, `span_s` and `plans`.
"""

from autopar.passes.solvers.stages.clustering import cluster_operators, least_flops
from autopar.passes.solvers.stages.listing import plans
from autopar.passes.solvers.stages.problem import StageChoice, StageProblem, span_s
from autopar.passes.solvers.stages.recurrence import CostToGo, least_span_s

__all__ = [
    "CostToGo",
    "StageChoice",
    "StageProblem",
    "cluster_operators",
    "least_flops",
    "least_span_s",
    "plans",
    "span_s",
]
