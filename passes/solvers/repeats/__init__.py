"""Solves choice problems with repeated blocks: many equal copies, written down once.

Read `repeats.py` (the problem), `powers.py` (min-plus powers of a table), `order.py` (plans, which
do not depend on numbers), `elimination.py` (the optimum at given weights), `messages.py` (a bound
and a choice where tables are too large), `exchange.py` (changes of single copies under a budget),
`select.py` (the solver). May import `passes/solvers/choice`,
`passes/solvers/eliminate` and `passes/solvers/problem`. Mainly hands on `RepeatedProblems`,
`RepeatedSolver` and `quick_plan`.
"""

from autopar.passes.solvers.repeats.order import RepeatedPlan
from autopar.passes.solvers.repeats.repeats import (
    Repeat,
    RepeatedChoice,
    RepeatedProblem,
    RepeatedProblems,
)
from autopar.passes.solvers.repeats.select import QuickPlan, RepeatedSolver, quick_plan

__all__ = [
    "QuickPlan",
    "Repeat",
    "RepeatedChoice",
    "RepeatedPlan",
    "RepeatedProblem",
    "RepeatedProblems",
    "RepeatedSolver",
    "quick_plan",
]
