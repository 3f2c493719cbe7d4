"""Choice problems with repeated blocks: many copies of some variables, written down once.

A problem of N equal layers has N copies of one block of variables. Copy k is joined to copy k - 1
as the first copy is to what comes before it, so one block and its number of copies say all. Every
copy makes its own choices. The problem is that of all copies written out; it is solved without
writing them out (`elimination.py`). Problems that differ only in their numbers share all else
(`RepeatedProblems`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.arrays import Array
from autopar.caching import once
from autopar.passes.solvers.problem import (
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    ChoiceTotals,
    Edge,
    Entries,
    Layout,
    Numbers,
    ProblemError,
    Shape,
)

# Rows that are kept, of the problems asked for last. To write a row takes a fraction of the time
# that solving the problem takes.
MOST_ROWS = 4


@dataclass(frozen=True)
class Repeat:
    """`count` copies of the variables `block`.

    `counterpart` maps a variable u before the block to the one v in the block that stands for it.
    The first copy is joined to u, each later copy to the v of the copy before. Variables `after`
    the block are joined to the last copy alone, and there only to counterparts. Any other variable
    that the block is joined to is joined to every copy.
    """

    block: tuple[int, ...]
    counterpart: Mapping[int, int]
    after: frozenset[int]
    count: int


@dataclass(frozen=True)
class RepeatedChoice:
    """`base` has a choice for every variable; for variables of blocks it is the last copy's.
    `copies[r][k]` are the choices of repeat r's `block` in copy k."""

    base: Choice
    copies: tuple[tuple[Choice, ...], ...]


@dataclass(frozen=True, eq=False)
class RepeatedProblems:
    """Choice problems of the same variables, choices and edges, in which some blocks stand for
    several copies. Parallel edges are merged. What does not depend on the numbers is computed once.

    Raises `ProblemError` where a block is joined otherwise than `Repeat` says.
    """

    numbers: ChoiceProblems
    repeats: tuple[Repeat, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", self.numbers.merged())
        sizes, owner = self.numbers.sizes, self.owner
        if len(owner) < sum(len(r.block) for r in self.repeats):
            raise ProblemError("a variable is in two repeated blocks")
        for repeat in self.repeats:
            for u, v in repeat.counterpart.items():
                if u in owner or v not in repeat.block or sizes[u] != sizes[v]:
                    raise ProblemError(f"variable {v} cannot be the like of {u}")
        for edge in self.numbers.edges:
            for inside, outside in ((edge.u, edge.v), (edge.v, edge.u)):
                r, other = owner.get(inside), owner.get(outside)
                if r is None or r == other:
                    continue
                repeat = self.repeats[r]
                last = outside in repeat.after
                if other is not None or (last and inside not in repeat.counterpart.values()):
                    raise ProblemError(f"variables {inside} and {outside} cannot be joined")

    def of(self, i: int, times: float = 1) -> RepeatedProblem:
        """Problem i, with `times` the bytes of what is not stored."""
        return RepeatedProblem(self, i, times)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each variable has."""
        return self.numbers.sizes

    @property
    def layout(self) -> Layout:
        """Where the numbers lie in a row."""
        return self.numbers.layout

    @cached_property
    def owner(self) -> dict[int, int]:
        """Variable of a block -> the index of its repeat."""
        return {v: r for r, repeat in enumerate(self.repeats) for v in repeat.block}

    @cached_property
    def copy_edges(self) -> tuple[tuple[int, ...], ...]:
        """Per repeat, the indices of the edges that every copy has."""
        out = []
        for repeat in self.repeats:
            block = {*repeat.block}
            every = ((i, e) for i, e in enumerate(self.numbers.edges) if e.is_of(block))
            out.append(tuple(i for i, e in every if not e.is_of(repeat.after)))
        return tuple(out)

    @cached_property
    def once(self) -> tuple[int, ...]:
        """The indices of the edges that exist once: those of no copy, or of the last copy alone."""
        repeated = set(itertools.chain.from_iterable(self.copy_edges))
        return tuple(i for i in range(len(self.numbers.edges)) if i not in repeated)

    def edges(self, places: Iterable[int]) -> list[Edge]:
        """The edges at some indices."""
        return [self.numbers.edges[i] for i in places]

    def tables(self, places: Iterable[int]) -> Iterator[tuple[Edge, int, Shape]]:
        """The edges at some indices, with the offset of their table in a row, and its shape."""
        layout, edges = self.layout, self.numbers.edges
        return ((edges[i], layout.table_at[i], edges[i].shape) for i in places)

    @cached_property
    def outside(self) -> list[tuple[int, ...]]:
        """Per repeat, the variables that all its copies are joined to."""
        return [
            tuple(
                sorted(
                    {v for e in self.edges(at) for v in (e.u, e.v)} - {*of.block, *of.counterpart}
                )
            )
            for of, at in zip(self.repeats, self.copy_edges, strict=True)
        ]

    @cached_property
    def single_entries(self) -> Entries:
        """The entries that count once: of variables outside blocks, and of the edges `once`."""
        others = [v for v in range(len(self.sizes)) if v not in self.owner]
        return Entries.of(self.numbers, others, self.once)

    @cached_property
    def copy_entries(self) -> list[Entries]:
        """Per repeat, the entries of one copy."""
        return [
            Entries.of(self.numbers, repeat.block, edges)
            for repeat, edges in zip(self.repeats, self.copy_edges, strict=True)
        ]

    def unrolled_size(self, size: Callable[[Iterable[int], Iterable[Shape]], int]) -> int:
        """A size of the problem written out. `size` takes numbers of choices and shapes of tables,
        and must be additive."""
        sizes, shapes = self.sizes, [edge.shape for edge in self.numbers.edges]
        total = size(
            [k for v, k in enumerate(sizes) if v not in self.owner], [shapes[i] for i in self.once]
        )
        for repeat, edges in zip(self.repeats, self.copy_edges, strict=True):
            copy_terms = size([sizes[v] for v in repeat.block], [shapes[i] for i in edges])
            total += repeat.count * copy_terms
        return total

    def row(self, i: int, times: float) -> Numbers:
        """The numbers of problem i; those of the last few problems are kept."""
        key = i, times
        if key not in self._rows:
            self._rows[key] = Numbers.row(self.numbers, i, times)
            if len(self._rows) > MOST_ROWS:
                del self._rows[next(iter(self._rows))]
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[tuple[int, float], Numbers]:
        return {}


@dataclass(frozen=True, eq=False)
class RepeatedProblem:
    """Problem `case` of several with repeated blocks, with `times` the bytes of what is not stored.
    `costs` are the costs of a row, [numbers], if they are others than the problem's."""

    every: RepeatedProblems
    case: int
    times: float = 1
    costs: Array | None = None

    @staticmethod
    def of_one(numbers: ChoiceProblem, repeats: tuple[Repeat, ...]) -> RepeatedProblem:
        """A single problem in which some blocks stand for several copies."""
        every = RepeatedProblems(ChoiceProblems.of_one(numbers), repeats)
        return RepeatedProblem(every, 0)

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        return self.every.repeats

    @property
    def row(self) -> Numbers:
        """Its numbers, [1, numbers]."""
        row = self.every.row(self.case, self.times)
        return row if self.costs is None else replace(row, cost_s=self.costs[None])

    @property
    def numbers(self) -> ChoiceProblem:
        """The problem with every block written down once."""
        return self.row.problem(self.every.numbers)

    def evaluate(self, choice: RepeatedChoice) -> ChoiceTotals:
        """The totals of a choice over all copies. Equal copies are evaluated once."""
        base = choice.base
        terms = [self._once_terms(base)]
        for r, (repeat, rows) in enumerate(zip(self.repeats, choice.copies, strict=True)):
            ins = tuple(repeat.counterpart)
            handed_on = [repeat.block.index(repeat.counterpart[u]) for u in ins]
            first = tuple(base[u] for u in ins)
            given = [first, *(tuple(row[c] for c in handed_on) for row in rows[:-1])]
            for (state, row), n in Counter(zip(given, rows, strict=True)).items():
                terms.append(n * self.copy_terms(r, base, state, row))
        return ChoiceTotals(*map(math.fsum, np.concatenate(terms, axis=1).tolist()))

    @once
    def _once_terms(self, base: Choice) -> Array:
        """[seconds and bytes; terms] of what counts once."""
        return self._terms(self.every.single_entries, base)

    def copy_terms(self, r: int, base: Choice, before: Choice, row: Choice) -> Array:
        """[seconds and bytes; terms] of one copy that is handed the choices `before` and
        makes the choices `row`; all else is as in `base`."""
        repeat = self.repeats[r]
        key = r, tuple([base[v] for v in self.every.outside[r]]), before, row
        if key not in self._known:
            chosen = list(base)
            for v, k in zip((*repeat.counterpart, *repeat.block), (*before, *row), strict=True):
                chosen[v] = k
            self._known[key] = self._terms(self.every.copy_entries[r], chosen)
        return self._known[key]

    def _terms(self, entries: Entries, choice: Sequence[int]) -> Array:
        """[seconds and bytes; terms]"""
        at, row = entries.at(choice), self.row
        return np.stack((row.cost_s[0, at], row.size_bytes[0, at]))

    @cached_property
    def _known(self) -> dict[tuple[int, Choice, Choice, Choice], Array]:
        return {}
