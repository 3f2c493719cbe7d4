"""Elimination of a problem with repeated blocks, without writing their copies out.

What a copy hands on to the next is the *state* of its variables that the next is joined to: a
class of choices that neither the next copy nor what comes after tells apart. Per copy, elimination
leaves one table over the state it is handed (x), the one it hands on (y), and classes of what all
copies are joined to (the outer variables o):

    T[o, x, y]      least total of a copy that gets x and hands on y

N copies are the N-th power of T in the algebra of min and + (`powers.py`): one more table of an
ordinary problem, which elimination solves. Walking back, each copy gets the choices that are best
between what it gets and hands on.

To branch (`Branch`), walks through the states are restricted: to those that stay in one state,

    T[o, s, s] and nothing else

or to those that change it at least once, which are walks over twice as many states, where the
second half are those after a change:

    [ diagonal of T   rest of T ]
    [ infinite        T         ]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.passes.solvers.conditioning import (
    FIRST_ENTRIES,
    ConditionedPlan,
    Lazy,
    minimise_conditioned,
    plan_conditioned,
)
from autopar.passes.solvers.elimination import (
    Projection,
    minimise,
    project,
)
from autopar.passes.solvers.elimination_order import (
    Axes,
    EliminationPlan,
    Limits,
    Scope,
    TooWide,
    plan_order,
)
from autopar.passes.solvers.lagrangian import Point
from autopar.passes.solvers.partitions import Partitions
from autopar.passes.solvers.potentials import Kinds, Numbers, Weights
from autopar.passes.solvers.powers import Power
from autopar.passes.solvers.problem import Choice, Codes, Edge, FloatArray, Totals
from autopar.passes.solvers.repeats import RepeatedChoice, RepeatedProblem


@dataclass(frozen=True)
class Branch:
    """The copies of one repeat hand on the `state` that they are handed; None: not all do."""

    repeat: int
    state: int | None


class RepeatedElimination:
    """A `Minimiser` of a problem with repeats.

    Raises `TooWide` where a table over what one copy hands on would be too large.
    """

    def __init__(self, problem: RepeatedProblem, limits: Limits | None = None) -> None:
        self.problem = problem
        self.branch: Branch | None = None
        limits = limits or Limits()
        self._blocks = [_Block(problem, r, limits) for r in range(len(problem.repeats))]
        # Of a block, only the states of the last copy are variables here.
        self._states = {s.last: s for block in self._blocks for s in block.states}
        inside = {v for repeat in problem.repeats for v in repeat.block} - self._states.keys()
        numbers = problem.numbers
        self._variables = [v for v in range(numbers.n_variables) if v not in inside]
        place = {v: i for i, v in enumerate(self._variables)}
        sizes = [
            self._states[v].n if v in self._states else numbers.sizes[v] for v in self._variables
        ]
        once, blocks = (
            [Axes(tuple(place[v] for v in t.scope), t.codes) for t in tables]
            for tables in (
                [self._axes(e) for e in problem.once],
                [block.axes for block in self._blocks],
            )
        )
        handed_on = [place[v] for block in self._blocks for s in block.states for v in s.ends]
        self._plan = _plan(sizes, once, blocks, handed_on, self._blocks, limits)
        own = [
            Kinds.none(self._states[v].n) if v in self._states else Kinds.of(numbers, v)
            for v in self._variables
        ]
        self._once = Numbers.given(own, list(map(Kinds.of_edge, problem.once)))

    def _axes(self, edge: Edge) -> Axes:
        """What a table outside the blocks is over."""
        codes = []
        for v, of in ((edge.u, edge.rows), (edge.v, edge.columns)):
            state = self._states.get(v)
            codes.append(of if state is None else state.seen_by(of))
        return Axes((edge.u, edge.v), tuple(codes))

    def n_states(self, repeat: int) -> int:
        """How many states the copies of a repeat may hand on."""
        return self._blocks[repeat].n_states

    def states(self, repeat: int, choice: RepeatedChoice) -> set[int]:
        """Those that they do hand on in a choice."""
        block = self._blocks[repeat]
        at = [block.block.index(s.last) for s in block.states]
        return {
            _flat([int(s.codes[row[i]]) for s, i in zip(block.states, at, strict=True)], shape)
            for row in choice.copies[repeat]
            for shape in (block.state_shape,)
        }

    def within(self, branch: Branch) -> RepeatedElimination:
        """Of the choices of one branch."""
        out = copy(self)
        out.branch = branch
        return out

    def at(self, weights: Weights) -> tuple[float, Point[RepeatedChoice]]:
        """The least total and a choice that attains it (infinite: none is allowed)."""
        numbers, branch = self.problem.numbers, self.branch
        solved = [
            block.solved(weights, branch if branch is not None and branch.repeat == r else None)
            for r, block in enumerate(self._blocks)
        ]
        once = self._once.at(weights)
        if isinstance(self._plan, ConditionedPlan):
            lazy = [Lazy(s.one.table, s.joined) for s in solved]
            value, chosen = minimise_conditioned(self._plan, once, lazy)
        else:
            potentials = once.with_tables([s.joined(s.one.table) for s in solved])
            value, chosen = minimise(self._plan, potentials)
        # Of states, the class; of others, the choice.
        base = [0] * numbers.n_variables
        for v, k in zip(self._variables, chosen, strict=True):
            base[v] = k
        if math.isinf(value):
            return value, Point(RepeatedChoice(tuple(base), ()), Totals(math.inf, 0.0, math.inf))
        copies = []
        for s in solved:
            rows = s.copies(base)
            copies.append(rows)
            for v, k in zip(s.block.block, rows[-1], strict=True):
                base[v] = k
        choice = RepeatedChoice(tuple(base), tuple(copies))
        return value, Point(choice, self.problem.evaluate(choice))


def _plan(
    sizes: Sequence[int], once: Sequence[Axes], blocks: Sequence[Axes], handed_on: Sequence[int],
    of_blocks: Sequence[_Block], limits: Limits,
) -> EliminationPlan | ConditionedPlan:  # fmt: skip
    """Of what is outside of copies, and the tables of all copies; where either is large, with the
    variables that all copies are joined to as hubs."""
    entries = max((block.entries for block in of_blocks), default=1)
    if entries <= FIRST_ENTRIES:
        narrow = limits.and_(Limits(table_entries=FIRST_ENTRIES))
        with suppress(TooWide):
            return plan_order(sizes, (*once, *blocks), limits=narrow)
    try:
        return plan_conditioned(sizes, once, blocks, handed_on, limits)
    except TooWide:
        if entries > limits.table_entries:
            raise
        return plan_order(sizes, (*once, *blocks), limits=limits)


@dataclass(frozen=True, eq=False)
class _State:
    """What copies hand on of one variable: `first` is that of before them, `last` the last copy's;
    choice k is in class `codes[k]` of n, of which choice `firsts[c]` is one."""

    first: int
    last: int
    codes: Codes
    firsts: Codes

    @property
    def n(self) -> int:
        return len(self.firsts)

    @property
    def ends(self) -> tuple[int, int]:
        return self.first, self.last

    def seen_by(self, codes: Codes | None) -> Codes:
        """The place of every class, where these are the places of choices."""
        return self.firsts if codes is None else codes[self.firsts]


class _Block:
    """One repeat as a problem of its own: of the variables of a copy, its `outer` ones, and the
    states it is handed and hands on."""

    def __init__(self, problem: RepeatedProblem, r: int, limits: Limits) -> None:
        self.numbers, self.edges = problem.numbers, problem.of_copies[r]
        repeat, numbers = problem.repeats[r], problem.numbers
        self.block, self.count = repeat.block, repeat.count
        partitions = Partitions()
        self.states = [_state(problem, r, u, v, partitions) for u, v in sorted(repeat.like.items())]
        firsts = {s.first: s for s in self.states}
        around = {w for e in self.edges for w in (e.u, e.v)}
        self.outer = tuple(sorted(around - {*repeat.block} - firsts.keys()))
        self.variables = (*self.block, *self.outer)
        place = {v: i for i, v in enumerate(self.variables)}
        sizes = [numbers.sizes[v] for v in self.variables]
        n, n_states = len(sizes), len(self.states)
        sizes += 2 * [s.n for s in self.states]
        handed = {s.first: n + i for i, s in enumerate(self.states)}
        tables = []
        for e in self.edges:
            scope = tuple(handed.get(w, place.get(w, -1)) for w in (e.u, e.v))
            codes = tuple(
                firsts[w].seen_by(of) if w in firsts else of
                for w, of in ((e.u, e.rows), (e.v, e.columns))
            )
            tables.append(Axes(scope, codes))
        for i, s in enumerate(self.states):
            tables.append(Axes((place[s.last], n + n_states + i), (s.codes, None)))
        first_outer = len(self.block)
        remaining = tuple(range(first_outer, n + 2 * n_states))
        whole = tuple(range(n, n + 2 * n_states))
        self.plan = plan_order(sizes, tables, remaining, whole, limits)
        self.n_states = math.prod(s.n for s in self.states)
        shape = [self.plan.partitions.n_classes(p) for p in self.plan.left_over]
        # Of a product of two tables of one copy.
        self.entries = math.prod(shape) * self.n_states
        if math.prod(shape) > min(limits.kept_entries, limits.table_entries):
            raise TooWide(
                f"a repeated block hands on {self.n_states} states, a table of "
                f"{math.prod(shape)} entries; the limits are {limits}",
                hint="solve the ILP instead",
            )
        self.outer_codes = [
            self.plan.partitions.codes[p] for p in self.plan.left_over[: len(self.outer)]
        ]
        self.outer_shape = tuple(shape[: len(self.outer)])
        self.state_shape = tuple(s.n for s in self.states)

    @property
    def axes(self) -> Axes:
        """What all copies together are a table over: outer variables, those before, and the states
        of the last copy."""
        scope = (*self.outer, *(s.first for s in self.states), *(s.last for s in self.states))
        codes = (*self.outer_codes, *(s.codes for s in self.states))
        return Axes(scope, (*codes, *(None for _ in self.states)))

    def solved(self, weights: Weights, branch: Branch | None) -> _Solved:
        """One copy eliminated, for all walks or those of a branch."""
        return _Solved(self, project(self.plan, self._numbers.at(weights)), branch)

    @cached_property
    def _numbers(self) -> Numbers:
        """Of one copy: what is outside costs nothing, and states are those of its variables."""
        own = [Kinds.of(self.numbers, v) for v in self.block]
        own += [Kinds.none(k) for k in self.plan.sizes[len(self.block) :]]
        same = [np.where(np.eye(s.n, dtype=bool), 0.0, np.inf)[None] for s in self.states]
        tables = [*map(Kinds.of_edge, self.edges), *(Kinds(of, np.zeros_like(of)) for of in same)]
        return Numbers.given(own, tables)


def _state(
    problem: RepeatedProblem, r: int, first: int, last: int, partitions: Partitions
) -> _State:
    """The classes of choices that later copies, or what comes after them, tell apart."""
    seen = [partitions.of_none(problem.numbers.sizes[first])]
    for edges, v in ((problem.of_copies[r], first), (problem.once, last)):
        for e in edges:
            for w, codes in ((e.u, e.rows), (e.v, e.columns)):
                if w == v:
                    every = np.arange(problem.numbers.sizes[v])
                    seen.append(partitions.of(every if codes is None else codes))
    join = partitions.join(seen)
    return _State(first, last, partitions.codes[join], partitions.firsts[join])


@dataclass(frozen=True, eq=False)
class _Solved:
    """A block at some weights: the table of one copy, and from that of all."""

    block: _Block
    one: Projection
    branch: Branch | None

    def joined(self, one: FloatArray) -> FloatArray:
        """Of tables of one copy [..., states before, states after] those of all."""
        n = self.block.n_states
        table = self._power(one.reshape(-1, n, n)).table
        return table[:, :n, -n:].reshape(one.shape)

    def _power(self, cases: FloatArray) -> Power:
        """[cases, states, states] of one copy, to the number of copies."""
        branch, n = self.branch, self.block.n_states
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
        return Power.of(walks, self.block.count)

    def copies(self, base: Sequence[int]) -> tuple[Choice, ...]:
        """The choices of `block` in every copy, given those around all copies, and the class of the
        last copy's states."""
        block = self.block
        case = _flat(
            [int(codes[base[v]]) for v, codes in zip(block.outer, block.outer_codes, strict=True)],
            block.outer_shape,
        )
        start = _flat([int(s.codes[base[s.first]]) for s in block.states], block.state_shape)
        end = _flat([base[s.last] for s in block.states], block.state_shape)
        n = block.n_states
        power = self._power(self.one.table.reshape(-1, n, n)[case : case + 1])
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
