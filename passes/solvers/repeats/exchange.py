"""Exchanges in single copies of repeated blocks, which bring a choice close to the budget.

At a price of bytes all equal copies change at once. Between two such corners of the hull lie
choices in which some copies are as in one corner and some as in the other. Their bytes go in steps
of a whole copy. Smaller steps are *exchanges*. In one copy, one variable that is not handed on
takes another choice. Or the copy takes over all choices of a copy in another known solution that
hands on the same. So an exchange changes nothing around the copy, and those of different copies add
up:

    saved_s, more_bytes     of one exchange in a copy that is handed `before` and has chosen `row`
                            (`Exchanges._offers`)

This is a knapsack, filled greedily (`Exchanges.fit`). First, what exceeds the budget is saved at
the fewest seconds per byte (`_cut`). Then seconds are saved at the most seconds per byte (`_fill`;
Dantzig, "Discrete-variable extremum problems", Operations Research 5, 1957).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, Codes
from autopar.caching import once
from autopar.passes.solvers.choice import Point
from autopar.passes.solvers.problem import SAME_OPTIMUM_REL, Choice, codes_of, within
from autopar.passes.solvers.repeats.repeats import RepeatedChoice, RepeatedProblem, RepeatedProblems

# (repeat, choices handed, choices made): copies of one kind have the same exchanges.
_Kind = tuple[int, Choice, Choice]


@dataclass(frozen=True, eq=False)
class _Offers:
    """The exchanges of copies of one kind, [exchanges]: the seconds they save, the bytes they add.
    `gains` are the indices of those that save seconds, `cuts` of those that save bytes, best first.
    """

    saved_s: Array
    more_bytes: Array
    gains: Codes
    cuts: Codes

    @staticmethod
    def of(saved_s: Array, more_bytes: Array, least_s: float) -> _Offers:
        """Gains save more than `least_s`, most seconds per added byte first. Cuts save bytes,
        fewest seconds per saved byte first."""
        gains = np.flatnonzero(np.isfinite(saved_s) & (saved_s > least_s))
        cuts = np.flatnonzero(np.isfinite(saved_s) & (more_bytes < 0))
        order = np.lexsort((-saved_s[gains], -_s_per_byte(saved_s[gains], more_bytes[gains])))
        paid = _s_per_byte(saved_s[cuts], -more_bytes[cuts])
        by_paid = np.argsort(-paid, kind="stable")
        return _Offers(saved_s, more_bytes, gains[order], cuts[by_paid])

    def rank(self, e: int) -> tuple[float, float]:
        """The rank of a gain: seconds per added byte, then seconds."""
        saved_s, more_bytes = float(self.saved_s[e]), float(self.more_bytes[e])
        return (saved_s / more_bytes if more_bytes > 0 else math.inf), saved_s


def _s_per_byte(saved_s: Array, size_bytes: Array) -> Array:
    """Infinite where the bytes are not positive."""
    out = np.full(len(saved_s), np.inf)
    return np.divide(saved_s, size_bytes, out=out, where=size_bytes > 0)


class Exchanges:
    """The exchanges of a problem. Copies may take over those of the choices `known`."""

    def __init__(
        self, problem: RepeatedProblem, budget_bytes: float, known: Sequence[RepeatedChoice]
    ) -> None:
        self.problem, self.budget_bytes = problem, budget_bytes
        self._blocks = [_Copies(problem, r) for r in range(len(problem.repeats))]
        self._known = [
            block.group_by_state(row for choice in known for row in choice.copies[r])
            for r, block in enumerate(self._blocks)
        ]

    def fit(self, point: Point[RepeatedChoice]) -> Point[RepeatedChoice] | None:
        """A cheap choice within the budget that exchanges lead to from `point`; None: they lead to
        none."""
        copies, base = [list(rows) for rows in point.choice.copies], list(point.choice.base)
        left = self._cut(point.choice.base, copies, point.totals.bytes - self.budget_bytes)
        self._fill(point.choice.base, copies, left)
        for repeat, rows in zip(self.problem.repeats, copies, strict=True):
            for v, k in zip(repeat.block, rows[-1], strict=True):
                base[v] = k
        choice = RepeatedChoice(tuple(base), tuple(map(tuple, copies)))
        found = Point(choice, self.problem.evaluate(choice))
        return found if within(self.budget_bytes, found.totals.bytes) else None

    def _cut(self, base: Choice, copies: list[list[Choice]], over: float) -> float:
        """Save bytes where they cost least; returns what is then left of the budget."""
        while over > 0:
            best: tuple[float, _Kind, int] | None = None
            kinds = self._kinds(base, copies)
            for kind in kinds:
                offers = self._offers(base, kind)
                for e in offers.cuts[:1].tolist():
                    s_per_byte = float(offers.saved_s[e] / -offers.more_bytes[e])
                    if best is None or s_per_byte > best[0]:
                        best = s_per_byte, kind, e
            if best is None:
                break
            _, kind, e = best
            more_bytes = float(self._offers(base, kind).more_bytes[e])
            n = min(len(kinds[kind]), math.ceil(over / -more_bytes))
            self._take(copies, kind, kinds[kind][:n], e)
            over += n * more_bytes
        return -over

    def _fill(self, base: Choice, copies: list[list[Choice]], left: float) -> None:
        """Save the most seconds per byte, while the bytes fit in `left`."""
        while True:
            best: tuple[tuple[float, float], _Kind, int] | None = None
            kinds = self._kinds(base, copies)
            for kind in kinds:
                offers = self._offers(base, kind)
                for e in offers.gains[offers.more_bytes[offers.gains] <= left][:1].tolist():
                    if best is None or offers.rank(e) > best[0]:
                        best = offers.rank(e), kind, e
            if best is None:
                return
            _, kind, e = best
            n, more_bytes = len(kinds[kind]), float(self._offers(base, kind).more_bytes[e])
            if more_bytes > 0:
                n = min(n, int(left // more_bytes))
            self._take(copies, kind, kinds[kind][:n], e)
            left -= n * more_bytes

    def _kinds(self, base: Choice, copies: Sequence[Sequence[Choice]]) -> dict[_Kind, list[int]]:
        """Kind -> the copies of that kind."""
        kinds: dict[_Kind, list[int]] = {}
        for r, (block, rows) in enumerate(zip(self._blocks, copies, strict=True)):
            before = tuple(base[u] for u in block.ins)
            for k, row in enumerate(rows):
                kinds.setdefault((r, before, row), []).append(k)
                before = block.output_choices(row)
        return kinds

    @once
    def _offers(self, base: Choice, kind: _Kind) -> _Offers:
        """The exchanges of a kind: every choice of each variable that is not handed on, then known
        rows."""
        r, before, row = kind
        block = self._blocks[r]
        saved_s, more_bytes = block.change_costs(base, before, row)
        now_s, now_bytes = block.total(base, before, row)
        known = [block.total(base, before, new) for new in self._known_rows(kind)]
        return _Offers.of(
            np.concatenate((saved_s, [now_s - new_s for new_s, _ in known])),
            np.concatenate((more_bytes, [new_bytes - now_bytes for _, new_bytes in known])),
            SAME_OPTIMUM_REL * now_s,
        )

    def _known_rows(self, kind: _Kind) -> Sequence[Choice]:
        """Known rows that hand on the same as copies of this kind."""
        r, _, row = kind
        return self._known[r].get(self._blocks[r].output_choices(row), ())

    def _take(
        self, copies: list[list[Choice]], kind: _Kind, copies_of_kind: Sequence[int], e: int
    ) -> None:
        """Make exchange e of a kind's offers in some of its copies."""
        r, _, row = kind
        changes = self._blocks[r].changes
        if e < len(changes):
            i, k = changes[e]
            new = (*row[:i], k, *row[i + 1 :])
        else:
            new = self._known_rows(kind)[e - len(changes)]
        for copy in copies_of_kind:
            copies[r][copy] = new


@dataclass(frozen=True)
class _Joint:
    """An edge of a variable. Its numbers lie at `along` (by the variable's choice) plus `places`
    (by the choice on the other axis). `where` says whose that choice is: the copy's own ("inside"),
    one it is "handed", or one "outside". `at` is its index there."""

    along: Codes
    places: Codes
    where: str
    at: int


class _Copies:
    """The costs of one copy of a repeat."""

    def __init__(self, problem: RepeatedProblem, r: int) -> None:
        repeat, every = problem.repeats[r], problem.every
        self.problem, self.r, self.row = problem, r, problem.row
        self.block, self.ins = repeat.block, tuple(repeat.counterpart)
        self.place = {v: i for i, v in enumerate(repeat.block)}
        self.out = [self.place[repeat.counterpart[u]] for u in self.ins]
        self.inner = [i for i in range(len(repeat.block)) if i not in self.out]
        self.joints: list[list[_Joint]] = [[] for _ in repeat.block]
        handed = {u: i for i, u in enumerate(self.ins)}
        for e, table_at, shape in every.tables(every.copy_edges[r]):
            rows, columns = (
                codes_of(codes, every.sizes[v]) * stride
                for v, codes, stride in ((e.u, e.rows, shape[1]), (e.v, e.columns, 1))
            )
            for v, other, along, places in ((e.u, e.v, rows, columns), (e.v, e.u, columns, rows)):
                if v not in self.place:
                    continue
                where, at = "outside", other
                if other in self.place:
                    where, at = "inside", self.place[other]
                elif other in handed:
                    where, at = "handed", handed[other]
                self.joints[self.place[v]].append(_Joint(along + table_at, places, where, at))

        self._lay_out(every)

    def _lay_out(self, every: RepeatedProblems) -> None:
        """Where the numbers of each change of an inner variable lie: `own`, and of its joints at
        `along` plus the places of what is chosen at their other ends."""
        self.sizes = np.array([every.sizes[self.block[i]] for i in self.inner], dtype=np.int64)
        self.changes = [
            (i, k) for i, n in zip(self.inner, self.sizes.tolist(), strict=True) for k in range(n)
        ]
        starts = np.cumsum(self.sizes) - self.sizes
        self.starts = np.repeat(starts, self.sizes)
        own_at = np.array([every.layout.own_at[self.block[i]] for i in self.inner], dtype=np.int64)
        self.own = np.repeat(own_at - starts, self.sizes) + np.arange(len(self.changes))
        joints = [(n, j) for n, i in enumerate(self.inner) for j in self.joints[i]]
        self.inner_joints = [joint for _, joint in joints]
        self.lengths = [len(joint.along) for joint in self.inner_joints]
        none = np.zeros(0, dtype=np.int64)
        self.along = np.concatenate([none, *(joint.along for joint in self.inner_joints)])
        changes = [np.arange(self.sizes[n]) + starts[n] for n, _ in joints]
        self.change_of = np.concatenate([none, *changes])

    def output_choices(self, row: Choice) -> Choice:
        """The choices in a row that a copy hands on."""
        return tuple([row[i] for i in self.out])

    def group_by_state(self, rows: Iterable[Choice]) -> dict[Choice, list[Choice]]:
        """What rows hand on -> the distinct rows."""
        out: dict[Choice, list[Choice]] = {}
        for row in dict.fromkeys(rows):
            out.setdefault(self.output_choices(row), []).append(row)
        return out

    def change_costs(self, base: Choice, before: Choice, row: Choice) -> tuple[Array, Array]:
        """[changes]: the seconds that each saves, and the bytes that it adds, all else kept."""
        of = {"inside": row, "handed": before, "outside": base}
        places = [joint.places[of[joint.where][joint.at]] for joint in self.inner_joints]
        at = self.along + np.repeat(np.array(places, dtype=np.int64), self.lengths)
        chosen = np.array([row[i] for i in self.inner], dtype=np.int64)
        now = self.starts + np.repeat(chosen, self.sizes)
        saved = []
        for numbers in (self.row.cost_s[0], self.row.size_bytes[0]):
            each = np.bincount(self.change_of, numbers[at], len(self.own)) + numbers[self.own]
            saved.append(each[now] - each)
        saved_s, saved_bytes = saved
        return saved_s, -saved_bytes

    def total(self, base: Choice, before: Choice, row: Choice) -> tuple[float, float]:
        """(seconds, bytes) of a whole copy."""
        cost_s, size_bytes = self.problem.copy_terms(self.r, base, before, row).tolist()
        return math.fsum(cost_s), math.fsum(size_bytes)
