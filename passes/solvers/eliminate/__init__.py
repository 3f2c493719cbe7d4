"""Finds the least total of one problem exactly, by eliminating variables.

Read `elimination.py` (the recurrence), `elimination_order.py` and `greedy_order.py` (the order, and
how large tables become), `elimination_code.py` and `elimination_loops.py` (a plan as arrays for
compiled loops), `marginals.py` (the least total per choice). May import `passes/solvers/problem`.
Mainly hands on `plan_elimination`, `minimise`, `project` and `min_marginals`.
"""

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
    "EliminationPlan",
    "Projection",
    "TableLimits",
    "TooWide",
    "min_marginals",
    "minimise",
    "plan_elimination",
    "plan_order",
    "project",
]
