"""Solvers on plain numbers: arrays in, one choice per variable out; no torch.

`solve` is the entry; `solve_ilp` is the definition of the optimum, `solve_brute_force` what
both are tested against on small problems.
"""

from autopar.passes.solvers.choice import (
    Solver,
    solve,
    solve_brute_force,
    solve_by_elimination,
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
    "solve_brute_force",
    "solve_by_elimination",
    "solve_ilp",
]
