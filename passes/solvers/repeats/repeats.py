"""Choice problems with repeated blocks: many copies of some variables, written down once.

A problem of N alike layers has N copies of one block of variables. Copy k is joined to copy k - 1
as the first is to what comes before it, so one block and its number of copies say all. Every copy
makes choices of its own: the problem is that of all copies written out
(`RepeatedProblem.unrolled`), and is solved without writing them out (`repeats_elimination.py`).
Problems that differ in their numbers alone share all else (`RepeatedProblems`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.choice import reduce
from autopar.passes.solvers.problem import (
    BoolArray,
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    ChoiceTotals,
    Edge,
    Entries,
    FloatArray,
    Layout,
    Numbers,
    ProblemError,
    Shape,
)

# So many copies show all there is: the first, the last, and one between its likes.
_TELLING = 3
# Rows of numbers that are kept, of the problems that were last asked for: writing one down takes a
# fraction of what solving it does.
MOST_ROWS = 4


@dataclass(frozen=True)
class Repeat:
    """`count` copies of the variables `block`.

    `like` maps each variable before the block that is joined to it, but to later copies only
    through its like, to that like, a variable of the block. Variables `after` it are joined to the
    last copy alone, and only to likes. Whatever else the block is joined to, every copy is.
    """

    block: tuple[int, ...]
    like: Mapping[int, int]
    after: frozenset[int]
    count: int


@dataclass(frozen=True)
class RepeatedChoice:
    """`base` for every variable, where those of blocks are the last copy's; and of each repeat,
    per copy, the choices of `block`."""

    base: Choice
    copies: tuple[tuple[Choice, ...], ...]


@dataclass(frozen=True, eq=False)
class RepeatedProblems:
    """Choice problems of the same variables, choices and edges, of which some blocks stand for
    several copies; parallel edges are merged. What does not depend on their numbers is found once.

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
            for u, v in repeat.like.items():
                if u in owner or v not in repeat.block or sizes[u] != sizes[v]:
                    raise ProblemError(f"variable {v} cannot be the like of {u}")
        for edge in self.numbers.edges:
            for inside, outside in ((edge.u, edge.v), (edge.v, edge.u)):
                r, other = owner.get(inside), owner.get(outside)
                if r is None or r == other:
                    continue
                repeat = self.repeats[r]
                last = outside in repeat.after
                if other is not None or (last and inside not in repeat.like.values()):
                    raise ProblemError(f"variables {inside} and {outside} cannot be joined")

    def of(self, i: int, times: int = 1) -> RepeatedProblem:
        """One of the problems, with so many times the bytes of what is not stored."""
        return RepeatedProblem(self, i, times)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each variable has."""
        return self.numbers.sizes

    @property
    def layout(self) -> Layout:
        """Where numbers are in a row."""
        return self.numbers.layout

    @cached_property
    def owner(self) -> dict[int, int]:
        """Variable of a block -> the number of its repeat."""
        return {v: r for r, repeat in enumerate(self.repeats) for v in repeat.block}

    @cached_property
    def of_copies(self) -> tuple[tuple[int, ...], ...]:
        """Per repeat, the edges that every copy has, by their places."""
        out = []
        for repeat in self.repeats:
            block = {*repeat.block}
            every = ((i, e) for i, e in enumerate(self.numbers.edges) if e.is_of(block))
            out.append(tuple(i for i, e in every if not e.is_of(repeat.after)))
        return tuple(out)

    @cached_property
    def once(self) -> tuple[int, ...]:
        """The edges that are there once: of no copy, or of the last one alone."""
        repeated = set(itertools.chain.from_iterable(self.of_copies))
        return tuple(i for i in range(len(self.numbers.edges)) if i not in repeated)

    def edges(self, places: Iterable[int]) -> list[Edge]:
        """Those at some places."""
        return [self.numbers.edges[i] for i in places]

    def tables(self, places: Iterable[int]) -> Iterator[tuple[Edge, int, Shape]]:
        """Edges at some places, with where their table is in a row, and its shape."""
        layout, edges = self.layout, self.numbers.edges
        return ((edges[i], layout.table_at[i], layout.shapes[i]) for i in places)

    @cached_property
    def outside(self) -> list[tuple[int, ...]]:
        """Per repeat, what copies are joined to but each other."""
        return [
            tuple(sorted({v for e in self.edges(at) for v in (e.u, e.v)} - {*of.block, *of.like}))
            for of, at in zip(self.repeats, self.of_copies, strict=True)
        ]

    @cached_property
    def once_entries(self) -> Entries:
        """Of what is no copy's."""
        others = [v for v in range(len(self.sizes)) if v not in self.owner]
        return Entries.some(self.numbers, self.layout, others, self.once)

    @cached_property
    def copy_entries(self) -> list[Entries]:
        """Per repeat, of one copy."""
        return [
            Entries.some(self.numbers, self.layout, repeat.block, edges)
            for repeat, edges in zip(self.repeats, self.of_copies, strict=True)
        ]

    def written(self, size: Callable[[Iterable[int], Iterable[Shape]], int]) -> int:
        """A size of a problem written out, where those of variables and tables add up."""
        sizes, shapes = self.sizes, self.layout.shapes
        total = size(
            [k for v, k in enumerate(sizes) if v not in self.owner], [shapes[i] for i in self.once]
        )
        for repeat, edges in zip(self.repeats, self.of_copies, strict=True):
            of_copy = size([sizes[v] for v in repeat.block], [shapes[i] for i in edges])
            total += repeat.count * of_copy
        return total

    def row(self, i: int, times: int) -> Numbers:
        """The numbers of one problem; the last few are kept."""
        key = i, times
        if key not in self._rows:
            self._rows[key] = Numbers.of(self.numbers.some((i,), (times,)))
            if len(self._rows) > MOST_ROWS:
                del self._rows[next(iter(self._rows))]
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[tuple[int, int], Numbers]:
        return {}


@dataclass(frozen=True, eq=False)
class RepeatedProblem:
    """One of several problems with repeated blocks, with `times` the bytes of what is not stored;
    `only` are the numbers of a row whose costs count (None: all)."""

    every: RepeatedProblems
    case: int
    times: int = 1
    only: BoolArray | None = None
    budget_bytes: float | None = None

    @staticmethod
    def alone(numbers: ChoiceProblem, repeats: tuple[Repeat, ...]) -> RepeatedProblem:
        """A problem of which some blocks stand for several copies."""
        every = RepeatedProblems(ChoiceProblems.alone(numbers), repeats)
        return RepeatedProblem(every, 0, budget_bytes=numbers.budget_bytes)

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        return self.every.repeats

    @property
    def row(self) -> Numbers:
        """Its numbers, [1, numbers]."""
        row = self.every.row(self.case, self.times)
        if self.only is None:
            return row
        return replace(row, cost_s=np.where(self.only, row.cost_s, 0.0))

    @property
    def numbers(self) -> ChoiceProblem:
        """With every block written down once."""
        every, layout = self.every.numbers, self.every.layout
        own_at = list(zip(layout.own_at, layout.n_choices, strict=True))
        table_at = list(zip(layout.table_at, layout.shapes, strict=True))
        row = self.row
        own, tables = [], []
        for kind in (row.cost_s[0], row.tie[0], row.size_bytes[0]):
            own.append(tuple(kind[at : at + n] for at, n in own_at))
            tables.append([kind[at : at + math.prod(of)].reshape(of) for at, of in table_at])
        edges = (
            replace(e, cost_s=cost_s, tie=tie, bytes=size_bytes)
            for e, cost_s, tie, size_bytes in zip(every.edges, *tables, strict=True)
        )
        return ChoiceProblem(
            every.names, own[0], own[1], own[2], tuple(edges), self.budget_bytes, is_checked=True
        )

    # -- written out -------------------------------------------------------------------------

    def unrolled(self, n_most: int | None = None) -> tuple[ChoiceProblem, list[list[int]]]:
        """The problem with every copy, or at most `n_most` of each, written out; and per variable
        the numbers of its copies there."""
        numbers, counts = self.numbers, [min(r.count, n_most or r.count) for r in self.repeats]
        owner = self.every.owner
        n_copies = [counts[owner[v]] if v in owner else 1 for v in range(len(numbers.names))]
        ends = np.cumsum([0, *n_copies])
        where = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        origin = [v for v, copies in enumerate(where) for _ in copies]
        edges = [
            replace(edge, u=u, v=v) for edge in numbers.edges for u, v in self._joined(edge, where)
        ]
        written = ChoiceProblem(
            tuple(f"{numbers.names[v]} {i}" for i, v in enumerate(origin)),
            tuple(numbers.cost_s[v] for v in origin),
            tuple(numbers.tie[v] for v in origin),
            tuple(numbers.bytes[v] for v in origin),
            tuple(edges),
            numbers.budget_bytes,
        )
        return written, where

    def _joined(self, edge: Edge, where: list[list[int]]) -> Iterator[tuple[int, int]]:
        """The pairs of copies that an edge joins."""
        owner = self.every.owner
        r = owner.get(edge.u, owner.get(edge.v))
        if r is None:
            yield where[edge.u][0], where[edge.v][0]
            return
        repeat = self.repeats[r]
        for k in range(max(len(where[edge.u]), len(where[edge.v]))):
            ends = [self._at_copy(v, k, repeat, where) for v in (edge.u, edge.v)]
            if not edge.is_of(repeat.after) or k + 1 == len(where[repeat.block[0]]):
                yield ends[0], ends[1]

    @staticmethod
    def _at_copy(v: int, k: int, repeat: Repeat, where: list[list[int]]) -> int:
        """What copy k of a block is joined to, where the block is joined to v."""
        if v in repeat.block:
            return where[v][k]
        return where[repeat.like[v]][k - 1] if v in repeat.like and k > 0 else where[v][0]

    def evaluate(self, choice: RepeatedChoice) -> ChoiceTotals:
        """What a choice sums to, over all copies; equal copies are added up once."""
        base = choice.base
        terms = [self._of_once(base)]
        for r, (repeat, rows) in enumerate(zip(self.repeats, choice.copies, strict=True)):
            ins = tuple(repeat.like)
            handed_on = [repeat.block.index(repeat.like[u]) for u in ins]
            first = tuple(base[u] for u in ins)
            given = [first, *(tuple(row[c] for c in handed_on) for row in rows[:-1])]
            for (state, row), n in Counter(zip(given, rows, strict=True)).items():
                terms.append(n * self.of_copy(r, base, state, row))
        return ChoiceTotals(*map(math.fsum, np.concatenate(terms, axis=1).tolist()))

    def _of_once(self, base: Choice) -> FloatArray:
        """[seconds, ties and bytes; terms] of what is no copy's."""
        if base not in self._known_once:
            self._known_once[base] = self._terms(self.every.once_entries, base)
        return self._known_once[base]

    def of_copy(self, r: int, base: Choice, before: Choice, row: Choice) -> FloatArray:
        """[seconds, ties and bytes; terms] of one copy that is handed `before` and has chosen
        `row`, where all else is as in `base`."""
        repeat = self.repeats[r]
        key = r, tuple([base[v] for v in self.every.outside[r]]), before, row
        if key not in self._known:
            chosen = list(base)
            for v, k in zip((*repeat.like, *repeat.block), (*before, *row), strict=True):
                chosen[v] = k
            self._known[key] = self._terms(self.every.copy_entries[r], chosen)
        return self._known[key]

    def _terms(self, entries: Entries, choice: Sequence[int]) -> FloatArray:
        """[seconds, ties and bytes; terms]"""
        at, row = entries.at(choice), self.row
        return np.stack((row.cost_s[0, at], row.tie[0, at], row.size_bytes[0, at]))

    @cached_property
    def _known(self) -> dict[tuple[int, Choice, Choice, Choice], FloatArray]:
        return {}

    @cached_property
    def _known_once(self) -> dict[Choice, FloatArray]:
        return {}

    # -- made smaller ------------------------------------------------------------------------

    def reduced(self) -> tuple[RepeatedProblem, tuple[NDArray[np.intp], ...]] | None:
        """Without choices that cannot matter, and what is left of each variable; None: nothing."""
        numbers = self.numbers
        written, where = self.unrolled(_TELLING)
        found = reduce(written, self._classes(where))
        if found is None:
            return None
        kept = tuple(found.kept[copies[0]] for copies in where)
        masks = [np.isin(np.arange(k), left) for k, left in zip(numbers.sizes, kept, strict=True)]
        return RepeatedProblem.alone(numbers.restrict(masks), self.repeats), kept

    def _classes(self, where: list[list[int]]) -> list[list[int]]:
        """Copies of one variable, with what they are the likes of."""
        before: dict[int, list[int]] = {}
        for repeat in self.repeats:
            for u, v in repeat.like.items():
                before.setdefault(v, []).append(u)
        taken = {u for users in before.values() for u in users}
        return [
            [*copies, *(where[u][0] for u in before.get(v, ()))]
            for v, copies in enumerate(where)
            if v not in taken
        ]
