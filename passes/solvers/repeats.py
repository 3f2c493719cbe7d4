"""Choice problems with repeated blocks: many copies of some variables, written down once.

A problem of N alike layers has N copies of one block of variables. Copy k is joined to copy k - 1
as the first is to what comes before it, so one block and its number of copies say all. Every copy
makes choices of its own: the problem is that of all copies written out
(`RepeatedProblem.unrolled`), and is solved without writing them out (`repeats_elimination.py`).
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

from autopar.passes.solvers.problem import (
    Choice,
    ChoiceProblem,
    Edge,
    FloatArray,
    ProblemError,
    Totals,
)
from autopar.passes.solvers.reductions import reduce

# So many copies show all there is: the first, the last, and one between its likes.
_TELLING = 3


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
class RepeatedProblem:
    """A choice problem, of which some blocks stand for several copies; parallel edges are merged.

    Raises `ProblemError` where a block is joined otherwise than `Repeat` says.
    """

    numbers: ChoiceProblem
    repeats: tuple[Repeat, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", self.numbers.merged())
        sizes, owner = self.numbers.sizes, self._owner
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

    @cached_property
    def _owner(self) -> dict[int, int]:
        """Variable of a block -> the number of its repeat."""
        return {v: r for r, repeat in enumerate(self.repeats) for v in repeat.block}

    # -- written out -------------------------------------------------------------------------

    def unrolled(self, n_most: int | None = None) -> tuple[ChoiceProblem, list[list[int]]]:
        """The problem with every copy, or at most `n_most` of each, written out; and per variable
        the numbers of its copies there."""
        numbers, counts = self.numbers, [min(r.count, n_most or r.count) for r in self.repeats]
        n_copies = [
            counts[self._owner[v]] if v in self._owner else 1 for v in range(len(numbers.names))
        ]
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
        r = self._owner.get(edge.u, self._owner.get(edge.v))
        if r is None:
            yield where[edge.u][0], where[edge.v][0]
            return
        repeat = self.repeats[r]
        for k in range(max(len(where[edge.u]), len(where[edge.v]))):
            ends = [self._at_copy(v, k, repeat, where) for v in (edge.u, edge.v)]
            if not {edge.u, edge.v} & repeat.after or k + 1 == len(where[repeat.block[0]]):
                yield ends[0], ends[1]

    def written(self, size: Callable[[Iterable[int], Iterable[Edge]], int]) -> int:
        """A size of the problem written out, where those of variables and edges add up."""
        sizes, owner = self.numbers.sizes, self._owner
        total = size([k for v, k in enumerate(sizes) if v not in owner], self.once)
        for repeat, edges in zip(self.repeats, self.of_copies, strict=True):
            total += repeat.count * size([sizes[v] for v in repeat.block], edges)
        return total

    @staticmethod
    def _at_copy(v: int, k: int, repeat: Repeat, where: list[list[int]]) -> int:
        """What copy k of a block is joined to, where the block is joined to v."""
        if v in repeat.block:
            return where[v][k]
        return where[repeat.like[v]][k - 1] if v in repeat.like and k > 0 else where[v][0]

    def evaluate(self, choice: RepeatedChoice) -> Totals:
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
        return Totals(*map(math.fsum, np.concatenate(terms, axis=1).tolist()))

    def _of_once(self, base: Choice) -> FloatArray:
        """[seconds, ties and bytes; terms] of what is no copy's."""
        if base not in self._known_once:
            others = (v for v in range(self.numbers.n_variables) if v not in self._owner)
            self._known_once[base] = self._terms(base, others, self.once)
        return self._known_once[base]

    def of_copy(self, r: int, base: Choice, before: Choice, row: Choice) -> FloatArray:
        """[seconds, ties and bytes; terms] of one copy that is handed `before` and has chosen
        `row`, where all else is as in `base`."""
        repeat, edges = self.repeats[r], self.of_copies[r]
        key = r, tuple([base[v] for v in self._outside[r]]), before, row
        if key not in self._known:
            chosen = list(base)
            for v, k in zip((*repeat.like, *repeat.block), (*before, *row), strict=True):
                chosen[v] = k
            self._known[key] = self._terms(chosen, repeat.block, edges)
        return self._known[key]

    def _terms(
        self, choice: Sequence[int], variables: Iterable[int], edges: Iterable[Edge]
    ) -> FloatArray:
        """[seconds, ties and bytes; terms]"""
        numbers, terms = self.numbers, list[tuple[float, float, float]]()
        for v in variables:
            k = choice[v]
            terms.append((numbers.cost_s[v][k], numbers.tie[v][k], numbers.bytes[v][k]))
        for e in edges:
            at = e.at(choice)
            terms.append((e.cost_s[at], e.tie[at], 0.0 if e.bytes is None else e.bytes[at]))
        return np.array(terms).reshape(-1, 3).T

    @cached_property
    def _known(self) -> dict[tuple[int, Choice, Choice, Choice], FloatArray]:
        return {}

    @cached_property
    def _known_once(self) -> dict[Choice, FloatArray]:
        return {}

    @cached_property
    def _outside(self) -> list[tuple[int, ...]]:
        """Per repeat, what copies are joined to but each other."""
        return [
            tuple(sorted({v for e in edges for v in (e.u, e.v)}.difference(of.block, of.like)))
            for of, edges in zip(self.repeats, self.of_copies, strict=True)
        ]

    @cached_property
    def of_copies(self) -> tuple[tuple[Edge, ...], ...]:
        """Per repeat, the edges that every copy has."""
        out = []
        for repeat in self.repeats:
            block = {*repeat.block}
            every = (e for e in self.numbers.edges if not block.isdisjoint((e.u, e.v)))
            out.append(tuple(e for e in every if repeat.after.isdisjoint((e.u, e.v))))
        return tuple(out)

    @cached_property
    def once(self) -> tuple[Edge, ...]:
        """The edges that are there once: of no copy, or of the last one alone."""
        repeated = {id(e) for edges in self.of_copies for e in edges}
        return tuple(e for e in self.numbers.edges if id(e) not in repeated)

    # -- made smaller ------------------------------------------------------------------------

    def reduced(self) -> tuple[RepeatedProblem, tuple[NDArray[np.intp], ...]] | None:
        """Without choices that cannot matter, and what is left of each variable; None: nothing."""
        written, where = self.unrolled(_TELLING)
        found = reduce(written, self._classes(where))
        if found is None:
            return None
        kept = tuple(found.kept[copies[0]] for copies in where)
        masks = [
            np.isin(np.arange(k), left) for k, left in zip(self.numbers.sizes, kept, strict=True)
        ]
        return RepeatedProblem(self.numbers.restrict(masks), self.repeats), kept

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
