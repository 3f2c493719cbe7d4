"""Elimination of a problem with repeated blocks, without writing their copies out.

Per copy, elimination leaves one table over what the copy before it hands on (x), what it hands on
itself (y), and what all copies are joined to (the outer variables o):

    T[o, x, y]      least total of a copy that gets x and hands on y

N copies are the N-th power of T in the algebra of min and + (`powers.py`): one more table of an
ordinary problem, which elimination solves. Walking back, each copy gets the choices that are best
between what it gets and hands on.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from autopar.passes.solvers.elimination import (
    Potentials,
    Projection,
    Weights,
    minimise,
    project,
)
from autopar.passes.solvers.elimination_order import Limits, Scope, TooWide, plan_order
from autopar.passes.solvers.lagrangian import Point
from autopar.passes.solvers.powers import Power
from autopar.passes.solvers.problem import Choice, FloatArray, Totals
from autopar.passes.solvers.repeats import RepeatedChoice, RepeatedProblem


class RepeatedElimination:
    """A `Minimiser` of a problem with repeats.

    Raises `TooWide` where a table over what one copy hands on would be too large.
    """

    def __init__(self, problem: RepeatedProblem, limits: Limits | None = None) -> None:
        self.problem = problem
        self._blocks = [_Block(problem, r, limits or Limits()) for r in range(len(problem.repeats))]
        inside = {v for repeat in problem.repeats for v in repeat.block}
        inside -= {v for repeat in problem.repeats for v in repeat.like.values()}
        numbers = problem.numbers
        self._variables = [v for v in range(numbers.n_variables) if v not in inside]
        self._place = {v: i for i, v in enumerate(self._variables)}
        self._edges = problem.once
        sizes = [numbers.sizes[v] for v in self._variables]
        scopes = [self._placed((e.u, e.v)) for e in self._edges]
        scopes += [self._placed(block.scope) for block in self._blocks]
        self._plan = plan_order(sizes, scopes, limits=limits)

    def _placed(self, scope: Scope) -> Scope:
        return tuple(self._place[v] for v in scope)

    def at(self, weights: Weights) -> tuple[float, Point[RepeatedChoice]]:
        """The least total and a choice that attains it (infinite: none is allowed)."""
        numbers, solved = self.problem.numbers, [block.solved(weights) for block in self._blocks]
        of_blocks = {v for repeat in self.problem.repeats for v in repeat.block}
        unary = tuple(
            np.zeros(numbers.sizes[v])
            if v in of_blocks
            else weights.total(numbers.cost_s[v], numbers.tie[v], numbers.bytes[v])
            for v in self._variables
        )
        tables: dict[Scope, FloatArray] = {}
        constant = 0.0
        edges = (((e.u, e.v), weights.total(e.cost_s, e.tie, e.bytes)) for e in self._edges)
        copies = ((s.block.scope, s.table) for s in solved)
        for scope, table in (*edges, *copies):
            placed = self._placed(scope)
            axes = sorted(range(len(placed)), key=lambda k: placed[k])
            at, table = tuple(placed[k] for k in axes), table.transpose(axes)
            if not at:
                constant += float(table)
                continue
            tables[at] = tables[at] + table if at in tables else table
        value, chosen = minimise(self._plan, Potentials(unary, tables))
        base = [0] * numbers.n_variables
        for v, k in zip(self._variables, chosen, strict=True):
            base[v] = k
        value += constant
        if math.isinf(value):
            return value, Point(RepeatedChoice(tuple(base), ()), Totals(math.inf, 0.0, math.inf))
        every = []
        for s in solved:
            rows = s.copies(base)
            every.append(rows)
            for v, k in zip(s.block.repeat.block, rows[-1], strict=True):
                base[v] = k
        choice = RepeatedChoice(tuple(base), tuple(every))
        return value, Point(choice, self.problem.evaluate(choice))


class _Block:
    """One repeat as a problem of its own: `ins` of the copy before, `outs`, and `outer`."""

    def __init__(self, problem: RepeatedProblem, r: int, limits: Limits) -> None:
        numbers, self.repeat, self.edges = problem.numbers, problem.repeats[r], problem.of_copies[r]
        self.ins = tuple(sorted(self.repeat.like))
        self.outs = tuple(self.repeat.like[u] for u in self.ins)
        inside = set(self.repeat.block)
        around = {w for e in self.edges for w in (e.u, e.v)} - inside - set(self.ins)
        self.outer = tuple(sorted(around))
        self.scope = (*self.outer, *self.ins, *self.outs)
        inner = [v for v in self.repeat.block if v not in self.outs]
        self.variables = [*inner, *self.scope]
        place = {v: i for i, v in enumerate(self.variables)}
        self.scopes = [(place[e.u], place[e.v]) for e in self.edges]
        self.n_inner, self.numbers = len(inner), numbers
        sizes = [numbers.sizes[v] for v in self.variables]
        remaining = tuple(range(len(inner), len(sizes)))
        self.shape = tuple(sizes[i] for i in remaining)
        self.n_states = math.prod(numbers.sizes[v] for v in self.ins)
        if math.prod(self.shape) * self.n_states > limits.table_entries:
            raise TooWide(
                f"a repeated block hands on {self.n_states} placements, beside tables of "
                f"{math.prod(self.shape)} entries; the limits are {limits}",
                hint="solve the ILP instead",
            )
        self.plan = plan_order(sizes, self.scopes, remaining, limits)

    def solved(self, weights: Weights) -> _Solved:
        """One copy eliminated, and its power."""
        numbers, inside = self.numbers, set(self.repeat.block)
        unary = tuple(
            weights.total(numbers.cost_s[v], numbers.tie[v], numbers.bytes[v])
            if v in inside
            else np.zeros(numbers.sizes[v])
            for v in self.variables
        )
        tables: dict[Scope, FloatArray] = {}
        for e, (u, v) in zip(self.edges, self.scopes, strict=True):
            table = weights.total(e.cost_s, e.tie, e.bytes)
            tables[min(u, v), max(u, v)] = table if u < v else table.T
        one = project(self.plan, Potentials(unary, tables))
        states = one.table.reshape(-1, self.n_states, self.n_states)
        return _Solved(self, one, Power.of(states, self.repeat.count))


@dataclass(frozen=True, eq=False)
class _Solved:
    """A block at some weights: the table of one copy, and that of all."""

    block: _Block
    one: Projection
    power: Power

    @property
    def table(self) -> FloatArray:
        return self.power.table.reshape(self.block.shape)

    def copies(self, base: list[int]) -> tuple[Choice, ...]:
        """The choices of `block` in every copy, given those around all copies."""
        block, sizes = self.block, self.block.numbers.sizes
        outer = tuple(base[v] for v in block.outer)
        state_sizes = tuple(sizes[v] for v in block.ins)
        outer_sizes = tuple(sizes[v] for v in block.outer)

        def state(of: Scope) -> int:
            return int(np.ravel_multi_index([base[v] for v in of], state_sizes)) if of else 0

        at = int(np.ravel_multi_index(outer, outer_sizes)) if outer else 0
        path = self.power.path(at, state(block.ins), state(block.outs))
        known: dict[tuple[int, int], Choice] = {}
        rows = []
        for pair in itertools.pairwise(path):
            if pair not in known:
                ends = [np.unravel_index(s, state_sizes) if state_sizes else () for s in pair]
                values = (*outer, *(int(k) for end in ends for k in end))
                chosen = dict(zip(block.variables, self.one.choice_at(values), strict=True))
                known[pair] = tuple(chosen[v] for v in block.repeat.block)
            rows.append(known[pair])
        return tuple(rows)
