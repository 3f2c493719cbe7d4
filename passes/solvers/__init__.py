"""Solvers on plain numbers: arrays in, one choice per variable out.

Read `problem` (the choice problem and its numbers), `eliminate` (exact variable elimination),
`choice` (one problem: elimination, prices, ILP), `repeats` (problems with repeated blocks),
`stages` (the cut into pipeline stages). May import `autopar.errors`, numpy, numba and the ILP
solvers; no torch, no other room. Mainly hands on `solve`, `ChoiceProblem` and `Solution`.
`solve_ilp` defines the optimum.
"""

from autopar.passes.solvers.choice import (
    Solver,
    solve,
    solve_ilp,
)
from autopar.passes.solvers.eliminate import TableLimits, TooWide
from autopar.passes.solvers.problem import (
    SAME_OPTIMUM_REL,
    ChoiceProblem,
    ChoiceProblems,
    ChoiceTotals,
    Edge,
    Infeasible,
    ProblemError,
    Solution,
    TimeLimitError,
)

__all__ = [
    "SAME_OPTIMUM_REL",
    "ChoiceProblem",
    "ChoiceProblems",
    "ChoiceTotals",
    "Edge",
    "Infeasible",
    "ProblemError",
    "Solution",
    "Solver",
    "TableLimits",
    "TimeLimitError",
    "TooWide",
    "solve",
    "solve_ilp",
]
