"""The numbers that elimination reads: one row per problem, one place per number.

A `Layout` says where in a row each variable's own costs and each table's entries lie. `Numbers`
holds costs and bytes in such rows. `Potentials` is the weighted sum that elimination
minimises (`Numbers.at`):

    weights.cost * cost_s + weights.size * bytes

`Entries` finds the numbers of a row that one choice adds up (`Entries.at`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.problem.layout import Layout
from autopar.passes.solvers.problem.problem import ChoiceProblem, codes_of
from autopar.passes.solvers.problem.problems import ChoiceProblems


class Weights(NamedTuple):
    """The weights of the minimised sum: cost * cost_s + size * bytes."""

    cost: float = 1.0
    size: float = 0.0


@dataclass(frozen=True, eq=False)
class Potentials:
    """One weighted sum of costs: rows [problems, numbers] in the places of `layout`."""

    layout: Layout
    rows: Array

    @staticmethod
    def of(problem: ChoiceProblem, weights: Weights) -> Potentials:
        """Of one problem, as its plan (`plan_elimination`) reads them."""
        return Numbers.of(problem).at(weights)

    @staticmethod
    def of_arrays(own: Sequence[Array], tables: Sequence[Array]) -> Potentials:
        """From arrays [problems or 1, choices] per variable and [problems or 1, ...] per table."""
        layout = Layout.of(own, tables, map(id, (*own, *tables)))
        return Potentials(layout, layout.rows(layout.placed(own, tables)))

    @cached_property
    def own(self) -> tuple[Array, ...]:
        """[problems, choices] per variable."""
        pairs = zip(self.layout.own_at, self.layout.n_choices, strict=True)
        return tuple(self.rows[:, at : at + n] for at, n in pairs)

    @cached_property
    def tables(self) -> tuple[Array, ...]:
        """[problems, ...] per table."""
        pairs = zip(self.layout.table_at, self.layout.shapes, strict=True)
        n = len(self.rows)
        return tuple(self.rows[:, at : at + math.prod(of)].reshape(n, *of) for at, of in pairs)


@dataclass(frozen=True, eq=False)
class Numbers:
    """Costs and bytes of one problem, [1, numbers] each, in the places of `layout`."""

    layout: Layout
    cost_s: Array
    size_bytes: Array

    @staticmethod
    def of(problem: ChoiceProblem) -> Numbers:
        """The numbers of one problem."""
        return Numbers.row(ChoiceProblems.of_one(problem), 0)

    @staticmethod
    def row(problems: ChoiceProblems, i: int, times: float = 1) -> Numbers:
        """The numbers of problem i, with `times` the bytes of what is not stored."""
        return Numbers(problems.layout, *problems.rows(i, times))

    def problem(self, problems: ChoiceProblems) -> ChoiceProblem:
        """The problem with these numbers, one of `problems` or like them. What shares a place in
        the row shares memory."""
        layout, edges = self.layout, problems.edges
        own_at = list(zip(layout.own_at, layout.n_choices, strict=True))
        table_at = list(zip(layout.table_at, (e.shape for e in edges), strict=True))
        own, tables = [], []
        for kind in (self.cost_s[0], self.size_bytes[0]):
            own.append(tuple(kind[at : at + n] for at, n in own_at))
            tables.append([kind[at : at + math.prod(of)].reshape(of) for at, of in table_at])
        of_edges = (
            replace(e, cost_s=cost_s, bytes=size_bytes)
            for e, cost_s, size_bytes in zip(edges, *tables, strict=True)
        )
        return ChoiceProblem(problems.names, own[0], own[1], tuple(of_edges), is_checked=True)

    def at(self, weights: Weights) -> Potentials:
        """The weighted sum. Forbidden entries stay infinite."""
        if weights.cost == 0:  # 0 * inf is NaN
            rows = np.where(np.isfinite(self.cost_s), 0.0, np.inf)
        else:
            rows = self.cost_s if weights.cost == 1 else self.cost_s * weights.cost
        if weights.size != 0:
            rows = rows + self.size_bytes * weights.size
        return Potentials(self.layout, rows)


@dataclass(frozen=True, eq=False)
class Entries:
    """Which numbers of a row a choice x adds up:

        own cost of variables[i]   at own_at[i] + x[variables[i]]
        table j                    at table_at[j] + sum_k places[ends_at[k][j] + x[ends[k][j]]]

    k = 0 and 1 are a table's two variables.
    """

    variables: Codes
    own_at: Codes
    table_at: Codes
    ends: tuple[Codes, Codes]
    ends_at: tuple[Codes, Codes]
    places: Codes

    @staticmethod
    def of(problems: ChoiceProblems, variables: Sequence[int], edges: Sequence[int]) -> Entries:
        """The entries of some variables, and of the edges at some indices."""
        layout = problems.layout
        every, n_places = [np.zeros(0, dtype=np.intp)], 0
        ends: tuple[list[int], list[int]] = ([], [])
        ends_at: tuple[list[int], list[int]] = ([], [])
        for e in (problems.edges[i] for i in edges):
            n_columns = e.cost_s.shape[-1]
            for k, (v, codes, stride) in enumerate(((e.u, e.rows, n_columns), (e.v, e.columns, 1))):
                places = codes_of(codes, problems.sizes[v])
                every.append(places * stride)
                ends[k].append(v)
                ends_at[k].append(n_places)
                n_places += len(places)
        return Entries(
            _codes(variables),
            _codes([layout.own_at[v] for v in variables]),
            _codes([layout.table_at[i] for i in edges]),
            (_codes(ends[0]), _codes(ends[1])), (_codes(ends_at[0]), _codes(ends_at[1])),
            np.concatenate(every),
        )  # fmt: skip

    def at(self, choice: Sequence[int]) -> Codes:
        """[entries]: where in a row the numbers of a choice of all variables are."""
        chosen = np.array(choice)
        of_tables = self.table_at + sum(
            self.places[at + chosen[end]] for end, at in zip(self.ends, self.ends_at, strict=True)
        )
        return np.concatenate((self.own_at + chosen[self.variables], of_tables))


def _codes(numbers: Sequence[int]) -> Codes:
    return np.array(numbers, dtype=np.intp)
