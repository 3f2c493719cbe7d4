"""Elimination of a problem with repeated blocks, without writing their copies out.

A copy hands on a *state* of those of its variables that the next copy is joined to: a class of
choices that look the same to the next copy and to what comes after. Eliminating one copy leaves one
table over the state x that it is handed, the state y that it hands on, and classes of the outer
variables o, which all copies are joined to (`_Solved.of`):

    T[o, x, y]      least total of a copy that is handed x and hands on y

N copies are the N-th min-plus power of T (`_Solved.joined`, `powers.py`). That is one more table of
an ordinary problem, which elimination solves. Walking back, each copy gets the choices that are
best between the state it is handed and the one it hands on (`_Solved.copies`).

A `Branch` restricts the walks through the states (`_Solved._power`). Either all copies stay in one
state s: everything but T[o, s, s] is infinite. Or the state changes at least once. Those are walks
over twice as many states, the second half of which are the states after a change:

    [ diagonal of T   rest of T ]
    [ infinite        T         ]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.choice import Point
from autopar.passes.solvers.eliminate import (
    Projection,
    minimise,
    project,
)
from autopar.passes.solvers.problem import Choice, ChoiceTotals, Potentials, Scope, Weights
from autopar.passes.solvers.repeats.order import BlockPlan, RepeatedPlan
from autopar.passes.solvers.repeats.powers import Power
from autopar.passes.solvers.repeats.repeats import RepeatedChoice, RepeatedProblem


@dataclass(frozen=True)
class Branch:
    """The copies of one repeat all hand on the `state` that they are handed; None: some copy does
    not."""

    repeat: int
    state: int | None


class RepeatedElimination:
    """A `Minimiser` of a problem with repeated blocks."""

    def __init__(self, problem: RepeatedProblem, plan: RepeatedPlan) -> None:
        self.problem, self.plan = problem, plan
        self.branch: Branch | None = None

    def n_states(self, repeat: int) -> int:
        """How many states the copies of a repeat can hand on."""
        return self.plan.blocks[repeat].n_states

    def states(self, repeat: int, choice: RepeatedChoice) -> set[int]:
        """The states that the copies of a repeat hand on in a choice."""
        block = self.plan.blocks[repeat]
        at = [block.block.index(s.last) for s in block.states]
        return {
            _flat([int(s.codes[row[i]]) for s, i in zip(block.states, at, strict=True)], shape)
            for row in choice.copies[repeat]
            for shape in (block.state_shape,)
        }

    def within(self, branch: Branch) -> RepeatedElimination:
        """The elimination restricted to the choices of one branch."""
        out = copy(self)
        out.branch = branch
        return out

    def at(self, weights: Weights) -> tuple[float, Point[RepeatedChoice]]:
        """The least total and a choice that attains it (infinite: none is allowed)."""
        of, branch = self.plan, self.branch
        row = of.constants.after(self.problem.row.at(weights).rows)
        solved = [
            _Solved.of(block, row, branch if branch is not None and branch.repeat == r else None)
            for r, block in enumerate(of.blocks)
        ]
        tables = (s.power_table().ravel() for s in solved)
        potentials = Potentials(of.layout, np.concatenate((row[0], *tables))[None])
        value, chosen = minimise(of.plan, potentials)
        # For states the class, for other variables the choice.
        base = [0] * of.n_variables
        for v, k in zip(of.variables, chosen, strict=True):
            base[v] = k
        if math.isinf(value):
            return value, Point(RepeatedChoice(tuple(base), ()), ChoiceTotals(math.inf, math.inf))
        copies = []
        for s in solved:
            rows = s.copies(base)
            copies.append(rows)
            for v, k in zip(s.block.block, rows[-1], strict=True):
                base[v] = k
        choice = RepeatedChoice(tuple(base), tuple(copies))
        return value, Point(choice, self.problem.evaluate(choice))


@dataclass(frozen=True, eq=False)
class _Solved:
    """A block at some weights: the table `one` of one copy, and from it that of all copies."""

    block: BlockPlan
    one: Projection
    branch: Branch | None

    @staticmethod
    def of(block: BlockPlan, row: Array, branch: Branch | None) -> _Solved:
        """From a row [1, numbers], for the walks of a branch; None: for all walks."""
        given = Potentials(block.layout, row[:, : block.layout.n_numbers])
        return _Solved(block, project(block.plan, given), branch)

    def power_table(self) -> Array:
        """The table of all copies: walks that begin before a change of state and end after it."""
        n, walks = self.block.n_states, self._walks(self.one.table)
        return Power.of(walks, self.block.count).table[:, :n, -n:]

    def _walks(self, one: Array) -> Array:
        """The steps of a branch, [cases, states, states], from tables of one copy."""
        branch, n = self.branch, self.block.n_states
        cases = one.reshape(-1, n, n)
        stays = np.eye(n, dtype=bool)
        if branch is None:
            walks = cases
        elif branch.state is not None:
            stays &= np.arange(n) == branch.state
            walks = np.where(stays, cases, np.inf)
        else:
            walks = np.full((len(cases), 2 * n, 2 * n), np.inf)
            walks[:, :n, :n] = np.where(stays, cases, np.inf)
            walks[:, :n, n:] = np.where(stays, np.inf, cases)
            walks[:, n:, n:] = cases
        return walks

    def copies(self, base: Sequence[int]) -> tuple[Choice, ...]:
        """The choices of `block` in every copy. `base` has the choices around all copies, and the
        class of the last copy's states."""
        block = self.block
        case = _flat(
            [int(codes[base[v]]) for v, codes in zip(block.outer, block.outer_codes, strict=True)],
            block.outer_shape,
        )
        start = _flat([int(s.codes[base[s.first]]) for s in block.states], block.state_shape)
        end = _flat([base[s.last] for s in block.states], block.state_shape)
        n = block.n_states
        one = self.one.table.reshape(-1, n, n)[case : case + 1]
        power = Power.of(self._walks(one), block.count)
        end += power.table.shape[-1] - n
        path = [state % n for state in power.path(0, start, end)]
        steps = list(itertools.pairwise(path))
        pairs = list(dict.fromkeys(steps))
        outer = [[base[v]] * len(pairs) for v in block.outer]
        ends = [np.array(states, dtype=np.intp) for states in zip(*pairs, strict=True)]
        states = [part for of in ends for part in _parts(of, block.state_shape)]
        columns = [np.array(column, dtype=np.intp) for column in (*outer, *states)]
        remaining = np.stack(columns, axis=1) if columns else np.zeros((len(pairs), 0), np.intp)
        found = self.one.choices_at(remaining)
        rows = [tuple(row[: len(block.block)]) for row in found.tolist()]
        row_of = dict(zip(pairs, rows, strict=True))
        return tuple(row_of[pair] for pair in steps)


def _flat(at: Sequence[int], shape: Scope) -> int:
    return int(np.ravel_multi_index(at, shape)) if shape else 0


def _parts(flat: Codes, shape: Scope) -> Sequence[Codes]:
    return list(np.unravel_index(flat, shape)) if shape else []
