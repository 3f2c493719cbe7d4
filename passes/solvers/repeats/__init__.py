"""repeats."""

from autopar.passes.solvers.repeats.order import RepeatedPlan
from autopar.passes.solvers.repeats.repeats import Repeat, RepeatedChoice, RepeatedProblems
from autopar.passes.solvers.repeats.select import RepeatedSolver, quick_plan

__all__ = [
    "Repeat",
    "RepeatedChoice",
    "RepeatedPlan",
    "RepeatedProblems",
    "RepeatedSolver",
    "quick_plan",
]
