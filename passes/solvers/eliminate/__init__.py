"""eliminate."""

from autopar.passes.solvers.eliminate.conditioning import (
    FIRST_ENTRIES,
    ConditionedPlan,
    Lazy,
    minimise_conditioned,
    plan_conditioned,
)
from autopar.passes.solvers.eliminate.elimination import Projection, minimise, project
from autopar.passes.solvers.eliminate.elimination_order import (
    EliminationPlan,
    TableLimits,
    TooWide,
    plan_elimination,
    plan_order,
)
from autopar.passes.solvers.eliminate.marginals import min_marginals

__all__ = [
    "FIRST_ENTRIES",
    "ConditionedPlan",
    "EliminationPlan",
    "Lazy",
    "Projection",
    "TableLimits",
    "TooWide",
    "min_marginals",
    "minimise",
    "minimise_conditioned",
    "plan_conditioned",
    "plan_elimination",
    "plan_order",
    "project",
]
