"""Defines the problem that every solver reads: choices, costs on pairs, one memory budget.

Read `problem.py` (the definition), `problems.py` (several that differ only in numbers), `layout.py`
and `potentials.py` (their numbers as rows), `partitions.py` and `tables.py` (what elimination
joins), `machine_code.py` (the numba decorator). May import `autopar.errors`; it is the lowest room
of `passes/solvers`. Mainly hands on `ChoiceProblem`, `ChoiceProblems`, `Potentials` and `Solution`.
"""

from autopar.passes.solvers.problem.layout import Layout, Shape
from autopar.passes.solvers.problem.machine_code import compile_s, compiled
from autopar.passes.solvers.problem.partitions import Partitions
from autopar.passes.solvers.problem.potentials import Entries, Numbers, Potentials, Weights
from autopar.passes.solvers.problem.problem import (
    BUDGET_REL,
    FORBIDDEN,
    SAME_OPTIMUM_REL,
    Choice,
    ChoiceProblem,
    ChoiceTotals,
    Edge,
    Infeasible,
    ProblemError,
    Solution,
    TimeLimitError,
    codes_of,
    infeasible_budget,
    make_solution,
    within,
)
from autopar.passes.solvers.problem.problems import ChoiceProblems
from autopar.passes.solvers.problem.tables import (
    Axes,
    EliminationStep,
    PlacedTable,
    Scope,
    axes_of,
    replace_views,
    views,
)

__all__ = [
    "BUDGET_REL",
    "FORBIDDEN",
    "SAME_OPTIMUM_REL",
    "Axes",
    "Choice",
    "ChoiceProblem",
    "ChoiceProblems",
    "ChoiceTotals",
    "Edge",
    "EliminationStep",
    "Entries",
    "Infeasible",
    "Layout",
    "Numbers",
    "Partitions",
    "PlacedTable",
    "Potentials",
    "ProblemError",
    "Scope",
    "Shape",
    "Solution",
    "TimeLimitError",
    "Weights",
    "axes_of",
    "codes_of",
    "compile_s",
    "compiled",
    "infeasible_budget",
    "make_solution",
    "replace_views",
    "views",
    "within",
]
