"""What elimination is given, in rows of numbers: one row per problem, one place per entry.

A row holds every variable's own costs and the entries of every table, as its `Layout` says. Costs,
ties and bytes are kept so (`Numbers`); a weighted sum of them is what is minimised (`Potentials`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.passes.solvers.problem import (
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    Codes,
    Edge,
    FloatArray,
)

Shape = tuple[int, ...]


class Weights(NamedTuple):
    """What is minimised: cost * cost_s + tie * ties + size * bytes."""

    cost: float = 1.0
    tie: float = 0.0
    size: float = 0.0


class Kinds(NamedTuple):
    """The numbers of a variable or of a table, [problems or 1, ...] each; no bytes are zeros."""

    cost_s: FloatArray
    tie: FloatArray
    size_bytes: FloatArray | None = None

    @staticmethod
    def of(problem: ChoiceProblem, v: int) -> Kinds:
        """Of a variable of one problem."""
        return Kinds(problem.cost_s[v][None], problem.tie[v][None], problem.bytes[v][None])

    @staticmethod
    def of_edge(edge: Edge) -> Kinds:
        """Of a table of one problem."""
        size_bytes = None if edge.bytes is None else edge.bytes[None]
        return Kinds(edge.cost_s[None], edge.tie[None], size_bytes)

    @staticmethod
    def none(n_choices: int) -> Kinds:
        """Of a variable that costs nothing by itself."""
        zeros = np.zeros((1, n_choices))
        return Kinds(zeros, zeros)

    @property
    def memory(self) -> Hashable:
        """Equal where the numbers are the same memory, as those of alike blocks are."""
        return tuple((a.ctypes.data, a.shape, a.strides) for a in self if a is not None)


@dataclass(frozen=True)
class Layout:
    """Where in a row every variable's own costs and every table are, how many choices and which
    shapes they have, and how long the row is."""

    own_at: tuple[int, ...]
    n_choices: tuple[int, ...]
    table_at: tuple[int, ...]
    shapes: tuple[Shape, ...]
    n_numbers: int

    @staticmethod
    def of(
        own: Sequence[FloatArray], tables: Sequence[FloatArray], keys: Iterable[Hashable]
    ) -> Layout:
        """Of arrays [problems or 1, ...]; those of equal keys are in one place."""
        n_numbers, at, places = 0, dict[Hashable, int](), list[int]()
        for key, array in zip(keys, (*own, *tables), strict=True):
            if key not in at:
                at[key] = n_numbers
                n_numbers += array[0].size
            places.append(at[key])
        return Layout(
            tuple(places[: len(own)]),
            tuple(array.shape[1] for array in own),
            tuple(places[len(own) :]),
            tuple(table.shape[1:] for table in tables),
            n_numbers,
        )

    def rows(
        self, own: Sequence[FloatArray | None], tables: Sequence[FloatArray | None]
    ) -> FloatArray:
        """[problems or 1, numbers]: arrays in their places; None are zeros."""
        arrays = dict(zip((*self.own_at, *self.table_at), (*own, *tables), strict=True))
        n = max((len(array) for array in arrays.values() if array is not None), default=1)
        out = np.zeros((n, self.n_numbers))
        for at, array in arrays.items():
            if array is not None:
                out[:, at : at + array[0].size] = array.reshape(len(array), -1)
        return out


@dataclass(frozen=True, eq=False)
class Potentials:
    """One weighted sum of costs: [problems, numbers] in the places of a layout."""

    layout: Layout
    rows: FloatArray

    @staticmethod
    def of(problem: ChoiceProblem | ChoiceProblems, weights: Weights) -> Potentials:
        """Of one problem, for `plan_elimination` of it, or of several."""
        return Numbers.of(problem).at(weights)

    @staticmethod
    def given(own: Sequence[FloatArray], tables: Sequence[FloatArray]) -> Potentials:
        """Of arrays [problems or 1, choices] per variable, and [problems or 1, ...] per table."""
        layout = Layout.of(own, tables, map(id, (*own, *tables)))
        return Potentials(layout, layout.rows(own, tables))

    @cached_property
    def own(self) -> tuple[FloatArray, ...]:
        """[problems, choices] per variable."""
        pairs = zip(self.layout.own_at, self.layout.n_choices, strict=True)
        return tuple(self.rows[:, at : at + n] for at, n in pairs)

    @cached_property
    def tables(self) -> tuple[FloatArray, ...]:
        """[problems, ...] per table."""
        pairs = zip(self.layout.table_at, self.layout.shapes, strict=True)
        n = len(self.rows)
        return tuple(self.rows[:, at : at + math.prod(of)].reshape(n, *of) for at, of in pairs)

    def with_tables(self, tables: Sequence[FloatArray]) -> Potentials:
        """And more tables, of one problem: [1, ...]."""
        layout, n = self.layout, self.layout.n_numbers
        more = Layout.of((), tables, map(id, tables))
        joined = Layout(
            layout.own_at, layout.n_choices, (*layout.table_at, *(n + at for at in more.table_at)),
            (*layout.shapes, *more.shapes), n + more.n_numbers,
        )  # fmt: skip
        return Potentials(joined, np.concatenate((self.rows, more.rows((), tables)), axis=1))


@dataclass(frozen=True, eq=False)
class Numbers:
    """Costs, ties and bytes, [problems or 1, numbers] each in the places of a layout."""

    layout: Layout
    cost_s: FloatArray
    tie: FloatArray
    size_bytes: FloatArray

    @staticmethod
    def of(problem: ChoiceProblem | ChoiceProblems) -> Numbers:
        """Of one problem, or of several."""
        problems = problem if isinstance(problem, ChoiceProblems) else problem.several()
        own = zip(problems.cost_s, problems.tie, problems.bytes, strict=True)
        return Numbers.given(
            [Kinds(*kinds) for kinds in own],
            [Kinds(e.cost_s, e.tie, e.bytes) for e in problems.edges],
        )

    @staticmethod
    def given(own: Sequence[Kinds], tables: Sequence[Kinds]) -> Numbers:
        """Of variables and tables."""
        keys = (kinds.memory for kinds in (*own, *tables))
        layout = Layout.of([k.cost_s for k in own], [k.cost_s for k in tables], keys)
        cost_s, tie, size_bytes = (
            layout.rows([kinds[i] for kinds in own], [kinds[i] for kinds in tables])
            for i in range(3)
        )
        return Numbers(layout, cost_s, tie, size_bytes)

    def of_one(self, problem: int) -> Numbers:
        """Of one of the problems."""
        cost_s, tie, size_bytes = (
            array[min(problem, len(array) - 1) :][:1]
            for array in (self.cost_s, self.tie, self.size_bytes)
        )
        return Numbers(self.layout, cost_s, tie, size_bytes)

    def totals(self, entries: Codes) -> tuple[float, float]:
        """(cost, bytes) of a choice of one problem, whose `Entries` are given."""
        return float(self.cost_s[0, entries].sum()), float(self.size_bytes[0, entries].sum())

    def at(self, weights: Weights) -> Potentials:
        """Weighed; what is forbidden stays infinite."""
        if weights.cost == 0:  # 0 * inf is NaN
            rows = np.where(np.isfinite(self.cost_s), 0.0, np.inf)
        else:
            rows = self.cost_s if weights.cost == 1 else self.cost_s * weights.cost
        if weights.tie != 0:
            rows = rows + self.tie * weights.tie
        if weights.size != 0:
            rows = rows + self.size_bytes * weights.size
        return Potentials(self.layout, rows)


@dataclass(frozen=True, eq=False)
class Entries:
    """Which entries of a row a choice adds up: every variable's own at `own_at`, and every table's
    at `table_at` and what the choices of its two variables `ends` add to that, which begins
    `ends_at` in `places`."""

    own_at: Codes
    table_at: Codes
    ends: tuple[Codes, Codes]
    ends_at: tuple[Codes, Codes]
    places: Codes

    @staticmethod
    def of(problems: ChoiceProblems, layout: Layout) -> Entries:
        every, n_places = [np.zeros(0, dtype=np.intp)], 0
        ends: tuple[list[int], list[int]] = ([], [])
        ends_at: tuple[list[int], list[int]] = ([], [])
        for e in problems.edges:
            n_columns = e.cost_s.shape[-1]
            for k, (v, codes, stride) in enumerate(((e.u, e.rows, n_columns), (e.v, e.columns, 1))):
                places = np.arange(problems.sizes[v]) if codes is None else codes
                every.append(places * stride)
                ends[k].append(v)
                ends_at[k].append(n_places)
                n_places += len(places)
        return Entries(
            _codes(layout.own_at), _codes(layout.table_at),
            (_codes(ends[0]), _codes(ends[1])), (_codes(ends_at[0]), _codes(ends_at[1])),
            np.concatenate(every),
        )  # fmt: skip

    def at(self, choice: Choice) -> Codes:
        """[entries] of a choice."""
        chosen = np.array(choice)
        of_tables = self.table_at + sum(
            self.places[at + chosen[end]] for end, at in zip(self.ends, self.ends_at, strict=True)
        )
        return np.concatenate((self.own_at + chosen, of_tables))


def _codes(numbers: Sequence[int]) -> Codes:
    return np.array(numbers, dtype=np.intp)
