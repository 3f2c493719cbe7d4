"""stages."""

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
