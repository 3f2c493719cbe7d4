"""Several choice problems of the same variables, choices and edges, each with its own numbers.

Where the numbers lie in a row (`Layout`) is computed once. Rows are written on request
(`ChoiceProblems.rows`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.arrays import Array, BoolArray
from autopar.passes.solvers.problem.layout import ArraysByOffset, Layout
from autopar.passes.solvers.problem.problem import (
    ChoiceProblem,
    Edge,
    check_numbers,
    memory,
    merged,
)
from autopar.passes.solvers.problem.tables import Axes, axes_of


@dataclass(frozen=True, eq=False)
class ChoiceProblems:
    """Choice problems that differ only in their numbers.

    Arrays are those of `ChoiceProblem` and `Edge` with a leading axis [problems], of length 1 where
    all problems agree. When bytes are multiplied (`rows`), those of `stored` variables and of their
    edges are not.

    Raises `ProblemError` as `ChoiceProblem` does.
    """

    n_problems: int
    names: tuple[str, ...]
    cost_s: tuple[Array, ...]
    bytes: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    stored: frozenset[int] = frozenset()
    is_checked: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.is_checked:
            check_numbers(self.names, self.cost_s, self.bytes, self.edges, 1)

    @staticmethod
    def of_one(problem: ChoiceProblem) -> ChoiceProblems:
        """A single problem as several."""
        edges = (e.mapped(lambda array: array[None]) for e in problem.edges)
        cost_s, size_bytes = (
            tuple(array[None] for array in arrays) for arrays in (problem.cost_s, problem.bytes)
        )
        return ChoiceProblems(1, problem.names, cost_s, size_bytes, tuple(edges), is_checked=True)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each variable has."""
        return tuple(c.shape[-1] for c in self.cost_s)

    def merged(self) -> ChoiceProblems:
        """The same problems with `merged` edges."""
        return replace(self, edges=merged(self.edges), is_checked=True)

    def rows(self, i: int, times: float = 1) -> tuple[Array, Array]:
        """(costs, bytes) of problem i, [1, numbers] each, in the places of the layout; with `times`
        the bytes of what is not stored."""
        cost_s, size_bytes = (self.layout.rows(kind, i) for kind in self._placed)
        if times != 1:
            np.multiply(size_bytes, times, out=size_bytes, where=self._grows)
        return cost_s, size_bytes

    def of(self, i: int) -> ChoiceProblem:
        """Problem i."""

        def own(array: Array) -> Array:
            found: Array = array[i if len(array) > 1 else 0]
            return found

        edges = (e.mapped(own) for e in self.edges)
        return ChoiceProblem(
            self.names,
            tuple(map(own, self.cost_s)),
            tuple(map(own, self.bytes)),
            tuple(edges),
            is_checked=True,
        )

    @cached_property
    def axes(self) -> tuple[Axes, ...]:
        """The axes of every edge's table. A variable is joined only to what tells its choices
        apart: else a concatenation of 66 layers would be a table of 66 axes."""
        return axes_of(self.edges, self.cost_s, self.bytes)

    @cached_property
    def layout(self) -> Layout:
        """Where the numbers lie in a row. Arrays of the same memory share a place."""
        own = zip(self.cost_s, self.bytes, strict=True)
        keys = [(v in self.stored, memory(*kinds)) for v, kinds in enumerate(own)]
        keys += [(e.is_of(self.stored), memory(e.cost_s, e.bytes)) for e in self.edges]
        layout = Layout.of(self.cost_s, [e.cost_s for e in self.edges], keys)
        shapes = (
            tuple(n for v, n in zip((e.u, e.v), e.shape, strict=True) if v in axes.scope)
            for e, axes in zip(self.edges, self.axes, strict=True)
        )
        return replace(layout, shapes=tuple(shapes))

    @cached_property
    def _placed(self) -> tuple[ArraysByOffset, ArraysByOffset]:
        """(costs, bytes), each as offset in a row -> array."""
        placed, edges = self.layout.placed, self.edges
        return (
            placed(self.cost_s, [e.cost_s for e in edges]),
            placed(self.bytes, [e.bytes for e in edges]),
        )

    @cached_property
    def _grows(self) -> BoolArray:
        """[numbers]: are its bytes multiplied?"""
        layout, out = self.layout, np.ones(self.layout.n_numbers, dtype=bool)
        for v in self.stored:
            out[layout.own_at[v] :][: layout.n_choices[v]] = False
        for e, at in zip(self.edges, layout.table_at, strict=True):
            if e.is_of(self.stored):
                out[at : at + e.cost_s[0].size] = False
        return out
