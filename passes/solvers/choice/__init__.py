"""Solves one choice problem: elimination, a price on bytes, and an ILP for what these leave open.

Read `ilp.py` (the definition of the optimum), `reductions.py` (choices that are impossible),
`lagrangian.py` (the budget as a price per byte), `message_passing.py` with `message_loops.py` (a
bound and a choice in milliseconds), `select.py` (which solver answers). May import
`passes/solvers/eliminate` and `passes/solvers/problem`. Mainly hands on `solve`, `solve_ilp`,
`search` and `MessageGraph`.
"""

from autopar.passes.solvers.choice.ilp import WorkLimit, most_columns, solve_ilp
from autopar.passes.solvers.choice.lagrangian import Bracket, Hull, Point, search
from autopar.passes.solvers.choice.message_passing import QUICK, MessageGraph, close_gap
from autopar.passes.solvers.choice.reductions import Reduced, conflict, restrict
from autopar.passes.solvers.choice.select import Solver, solve

__all__ = [
    "QUICK",
    "Bracket",
    "Hull",
    "MessageGraph",
    "Point",
    "Reduced",
    "Solver",
    "WorkLimit",
    "close_gap",
    "conflict",
    "most_columns",
    "restrict",
    "search",
    "solve",
    "solve_ilp",
]
