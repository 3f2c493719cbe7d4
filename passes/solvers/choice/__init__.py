"""choice."""

from autopar.passes.solvers.choice.brute_force import solve_brute_force
from autopar.passes.solvers.choice.hull import hull_corners_of
from autopar.passes.solvers.choice.ilp import WorkLimit, most_columns, solve_ilp
from autopar.passes.solvers.choice.lagrangian import Bracket, Hull, Point, search
from autopar.passes.solvers.choice.reductions import reduce
from autopar.passes.solvers.choice.select import (
    QUICK,
    Solver,
    least_tie,
    solve,
    solve_by_elimination,
    tie_weight,
)

__all__ = [
    "QUICK",
    "Bracket",
    "Hull",
    "Point",
    "Solver",
    "WorkLimit",
    "hull_corners_of",
    "least_tie",
    "most_columns",
    "reduce",
    "search",
    "solve",
    "solve_brute_force",
    "solve_by_elimination",
    "solve_ilp",
    "tie_weight",
]
