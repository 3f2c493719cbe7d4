"""How problems with repeated blocks are eliminated: what does not depend on their numbers.

Every block has a plan for one copy, which leaves a table over states and outer variables
(`BlockPlan`, `elimination.py`). A second plan eliminates the other variables, with one table for
all copies of each block (`RepeatedPlan`). Both read the same row: the numbers of a problem, then
constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.eliminate import (
    TableLimits,
    TooWide,
    plan_order,
)
from autopar.passes.solvers.problem import Axes, Layout, Partitions, codes_of
from autopar.passes.solvers.repeats.repeats import RepeatedProblems


class RepeatedPlan:
    """How problems with repeated blocks are eliminated, whatever their numbers.

    Raises `TooWide` where a table over what one copy hands on would be too large.
    """

    def __init__(self, problems: RepeatedProblems, limits: TableLimits | None = None) -> None:
        limits = limits or TableLimits()
        self.constants = _Constants(problems.layout.n_numbers)
        self.blocks = [
            BlockPlan(problems, r, limits, self.constants) for r in range(len(problems.repeats))
        ]
        # Of a block, only the states of the last copy are variables of this plan.
        states = {s.last: s for block in self.blocks for s in block.states}
        inside = {v for repeat in problems.repeats for v in repeat.block} - states.keys()
        sizes, layout = problems.sizes, problems.layout
        self.n_variables = len(sizes)
        self.variables = [v for v in range(len(sizes)) if v not in inside]
        place = {v: i for i, v in enumerate(self.variables)}
        n_choices = [states[v].n if v in states else sizes[v] for v in self.variables]

        once = [_renumbered(problems.numbers.axes[i], place, states) for i in problems.once]
        blocks = [
            Axes(tuple(place[v] for v in block.axes.scope), block.axes.codes)
            for block in self.blocks
        ]
        self.plan = plan_order(n_choices, (*once, *blocks), limits=limits)
        own_at = [
            self.constants.zeros(states[v].n) if v in states else layout.own_at[v]
            for v in self.variables
        ]
        shapes = [block.table_shape for block in self.blocks]
        ends = [self.constants.n_numbers, *(math.prod(shape) for shape in shapes)]
        *tables_at, n_numbers = itertools.accumulate(ends)
        # The tables that exist once, then the table of all copies of every block.
        self.layout = Layout(
            tuple(own_at), tuple(n_choices),
            (*(layout.table_at[i] for i in problems.once), *tables_at),
            (*(layout.shapes[i] for i in problems.once), *shapes), n_numbers,
        )  # fmt: skip


class _Constants:
    """Constants that follow a problem's numbers in its row: zeros, and equality tables, which are 0
    where two choices are the same and infinite elsewhere."""

    def __init__(self, n_numbers: int) -> None:
        self.n_numbers = n_numbers
        self._arrays: list[Array] = []
        self._at: dict[tuple[str, int], int] = {}

    def zeros(self, n: int) -> int:
        """The offset of n zeros."""
        return self._place(("zeros", n), np.zeros(n))

    def same(self, n: int) -> int:
        """The offset of an equality table of n choices."""
        return self._place(("same", n), np.where(np.eye(n, dtype=bool), 0.0, np.inf))

    def _place(self, key: tuple[str, int], array: Array) -> int:
        if key not in self._at:
            self._at[key] = self.n_numbers
            self._arrays.append(array.ravel())
            self.n_numbers += array.size
        return self._at[key]

    def after(self, row: Array) -> Array:
        """The row [1, numbers], followed by the constants."""
        return np.concatenate((row[0], *self._arrays))[None]


@dataclass(frozen=True, eq=False)
class _State:
    """What copies hand on of one variable. `first` is the variable before the copies, `last` its
    counterpart in the last copy. Choice k is in class `codes[k]` of n; choice `firsts[c]` is in
    class c."""

    first: int
    last: int
    codes: Codes
    firsts: Codes

    @property
    def n(self) -> int:
        return len(self.firsts)

    def seen_by(self, codes: Codes | None) -> Codes:
        """The index of every class on an axis, where `codes` are the indices of choices."""
        return self.firsts if codes is None else codes[self.firsts]


def _renumbered(axes: Axes, place: Mapping[int, int], states: Mapping[int, _State]) -> Axes:
    """Axes with variables renumbered by `place`; those in `states` have classes as choices."""
    ends = zip(axes.scope, axes.codes, strict=True)
    return Axes(
        tuple(place[v] for v in axes.scope),
        tuple(states[v].seen_by(of) if v in states else of for v, of in ends),
        tuple(place[v] for v in axes.follows),
    )


class BlockPlan:
    """One repeat as a problem of its own: over the variables of one copy, its `outer` ones, the
    states it is handed and those it hands on."""

    def __init__(
        self, problems: RepeatedProblems, r: int, limits: TableLimits, constants: _Constants
    ) -> None:
        edges, repeat = problems.edges(problems.copy_edges[r]), problems.repeats[r]
        self.block, self.count = repeat.block, repeat.count
        partitions = Partitions()
        self.states = [
            _state(problems, r, u, v, partitions) for u, v in sorted(repeat.counterpart.items())
        ]
        firsts = {s.first: s for s in self.states}
        around = {w for e in edges for w in (e.u, e.v)}
        self.outer = tuple(sorted(around - {*repeat.block} - firsts.keys()))
        self.variables = (*self.block, *self.outer)
        place = {v: i for i, v in enumerate(self.variables)}
        sizes = [problems.sizes[v] for v in self.variables]
        n, n_states = len(sizes), len(self.states)
        sizes += 2 * [s.n for s in self.states]
        handed = {s.first: n + i for i, s in enumerate(self.states)}
        tables = []
        for i in problems.copy_edges[r]:
            tables.append(_renumbered(problems.numbers.axes[i], place | handed, firsts))
        for i, s in enumerate(self.states):
            tables.append(Axes((place[s.last], n + n_states + i), (s.codes, None)))
        first_outer = len(self.block)
        remaining = tuple(range(first_outer, n + 2 * n_states))
        whole = tuple(range(n, n + 2 * n_states))
        self.plan = plan_order(sizes, tables, remaining, whole, limits)
        self.n_states = math.prod(s.n for s in self.states)
        shape = [self.plan.partitions.n_classes(p) for p in self.plan.left_over]
        n_entries = math.prod(shape)
        # A min-plus product of two tables of one copy adds up a number of states per entry.
        if n_entries > limits.kept_entries or n_entries * self.n_states > limits.table_entries:
            raise TooWide(
                f"a repeated block hands on {self.n_states} states, a table of "
                f"{n_entries} entries; the limits are {limits}",
                hint="solve the ILP instead",
            )
        self.outer_codes = [
            self.plan.partitions.codes[p] for p in self.plan.left_over[: len(self.outer)]
        ]
        self.outer_shape = tuple(shape[: len(self.outer)])
        self.state_shape = tuple(s.n for s in self.states)
        self.table_shape = (*self.outer_shape, *self.state_shape, *self.state_shape)
        self.layout = self._laid_out(problems, r, constants)

    def _laid_out(self, problems: RepeatedProblems, r: int, constants: _Constants) -> Layout:
        """The layout of one copy's numbers. What is outside the copy costs nothing, and equality
        tables join the states it hands on to its variables."""
        layout, at, sizes = problems.layout, problems.copy_edges[r], self.plan.sizes
        own_at = [layout.own_at[v] for v in self.block]
        own_at += [constants.zeros(n) for n in sizes[len(self.block) :]]
        tables_at = [layout.table_at[i] for i in at] + [constants.same(s.n) for s in self.states]
        shapes = [layout.shapes[i] for i in at] + [(s.n, s.n) for s in self.states]
        n_numbers = constants.n_numbers
        return Layout(tuple(own_at), sizes, tuple(tables_at), tuple(shapes), n_numbers)

    @property
    def axes(self) -> Axes:
        """The axes of the table of all copies: outer variables, the variables before the copies,
        the states of the last copy."""
        scope = (*self.outer, *(s.first for s in self.states), *(s.last for s in self.states))
        codes = (*self.outer_codes, *(s.codes for s in self.states))
        return Axes(scope, (*codes, *(None for _ in self.states)))


def _state(
    problems: RepeatedProblems, r: int, first: int, last: int, partitions: Partitions
) -> _State:
    """The classes of choices that later copies, or what comes after them, distinguish."""
    sizes = problems.sizes
    seen = [partitions.one_class(sizes[first])]
    for edges, v in ((problems.copy_edges[r], first), (problems.once, last)):
        for e in problems.edges(edges):
            for w, codes in ((e.u, e.rows), (e.v, e.columns)):
                if w == v:
                    seen.append(partitions.of(codes_of(codes, sizes[v])))
    join = partitions.join(seen)
    return _State(first, last, partitions.codes[join], partitions.firsts[join])
