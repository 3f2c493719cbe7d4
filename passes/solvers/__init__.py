"""Solvers on plain numbers, arrays in, one choice per variable out: a wing that exports nothing.

Read `problem` (the choice problem and its numbers), `eliminate` (exact variable elimination),
`choice` (one problem: elimination, prices, ILP), `repeats` (problems with repeated blocks),
`stages` (the cut into pipeline stages). May import `autopar.errors`, `autopar.caching`, numpy,
numba and the ILP solver; no torch, no other room. `choice.solve_ilp` defines the optimum.
"""
