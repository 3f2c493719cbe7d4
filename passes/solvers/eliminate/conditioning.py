"""Elimination where some variables, hubs, are joined to almost all: their values are tried.

A table over a chain's state and several hubs (an encoder's output, a shared weight, a bias that
all blocks read) has as many entries as all their choices multiplied. Without the hubs the chain is
thin. So everything else is eliminated first, which leaves a *core* of few variables and tables, and
the core is solved by branch and bound over its hubs, one hub per level:

    bound(h1 .. hl)     the core's least total where hubs 1 to l have these values, and every table
                        takes for the others whatever is best for it alone

which is exact once all hubs have values. All the branches of a level are eliminated together. A
few of the best of each level, followed to the end, give a first solution; what is bounded above it
is dropped. Bounds by parts that need not agree are those of mini-buckets (Dechter and Rish,
"Mini-buckets: a general scheme for bounded inference", Journal of the ACM 50, 2003).

Some tables of the core may be given as what they are made from (`Lazy`): of N copies of a block the
table of one, whose power is taken where hubs have values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.eliminate.elimination import eliminate, least_of_classes
from autopar.passes.solvers.eliminate.elimination_order import (
    EliminationPlan,
    TableLimits,
    TooWide,
    plan_order,
)
from autopar.passes.solvers.problem import Axes, Choice, Codes, FloatArray, Potentials, Scope

# Steps with more entries than this are left to the core, and the core's, without hubs, have fewer.
FIRST_ENTRIES = 2**25
CORE_ENTRIES = 2**17
MOST_HUBS = 4
HUBS_TRIED = 6
# Branches of each level that are followed for a first solution.
N_FOLLOWED = 2
# What is eliminated at once.
CHUNK_ENTRIES = 2**22
# Bounds that rounding alone may have lifted above the best are followed.
ROUNDING_REL = 1e-12

_ANY = TableLimits(2**62, 2**62, 2**62)

# A table's variables, and the place of every choice on its axes.
_Given = tuple[Scope, tuple[Codes, ...]]
Assigned = NDArray[np.intp]  # [branches, level]: the classes of the first hubs


@dataclass(frozen=True, eq=False)
class Lazy:
    """A table of the core made from another over the same axes: `finish` of that, per branch."""

    made_from: FloatArray
    finish: Callable[[FloatArray], FloatArray]


@dataclass(frozen=True, eq=False)
class _CoreTable:
    """A table of the core: its hubs by level, and the places of their classes on its axes; then its
    other axes."""

    levels: tuple[int, ...]
    order: tuple[int, ...]
    places: tuple[Codes, ...]


@dataclass(frozen=True, eq=False)
class ConditionedPlan:
    """`first` leaves the core, `core` are its variables without hubs; `hubs` with the classes of
    choices that the core tells apart."""

    first: EliminationPlan
    core: EliminationPlan
    variables: Scope
    hubs: Scope
    classes: tuple[int, ...]
    parts: tuple[_CoreTable, ...]

    def n_classes(self, level: int) -> int:
        return self.first.partitions.n_classes(self.classes[level])

    def within(self, limits: TableLimits) -> bool:
        """Are the tables? How many branches have to be followed is known only afterwards."""
        return self.first.within(limits) and self.core.within(limits)


def plan_conditioned(
    sizes: Sequence[int], tables: Iterable[Axes], lazy: Iterable[Axes] = (),
    kept: Iterable[int] = (), limits: TableLimits | None = None,
) -> ConditionedPlan:  # fmt: skip
    """A plan for some tables and lazy ones, in which the variables `kept` are no hubs.

    Raises `TooWide` where that does not keep the tables within `limits`.
    """
    limits = limits or TableLimits()
    plan = _planned(tuple(sizes), tuple(tables), tuple(lazy), frozenset(kept))
    if not plan.within(limits):
        raise TooWide(
            f"elimination needs a table of {max(plan.first.largest, plan.core.largest):.3g} entries"
            f" beside {len(plan.hubs)} hubs; the limits are {limits}",
            hint="solve the ILP instead",
        )
    return plan


@lru_cache(maxsize=64)
def _planned(
    sizes: Scope, tables: tuple[Axes, ...], lazy: tuple[Axes, ...], kept: frozenset[int]
) -> ConditionedPlan:
    whole = plan_order(sizes, (*tables, *lazy), limits=_ANY)
    core = {v for axes in lazy for v in axes.scope} | _in_large_steps(whole)
    while True:
        first = plan_order(sizes, tables, tuple(sorted(core)), limits=_ANY)
        more = {s.variable for s in first.steps if first.entries_of(s) > FIRST_ENTRIES}
        if not more:
            break
        core |= more
    variables = tuple(sorted(core))
    given = [*((p.scope, p.codes) for p in first.left), *(_written(sizes, axes) for axes in lazy)]
    n_tables = {v: sum(v in scope for scope, _ in given) for v in variables if v not in kept}
    often = sorted(n_tables, key=lambda v: (-n_tables[v], v))
    hubs: Scope = ()
    plan = _core_plan(sizes, variables, given, hubs)
    while max(plan.largest, _entries(given[-len(lazy) :] if lazy else (), hubs)) > CORE_ENTRIES:
        tried = [(*hubs, h) for h in often if h not in hubs][:HUBS_TRIED]
        if not tried or len(hubs) == MOST_HUBS:
            break
        plans = [(_core_plan(sizes, variables, given, of), of) for of in tried]
        plan, hubs = min(plans, key=lambda of: (of[0].entries, of[1]))
    return _joined(first, plan, variables, hubs, given)


def _in_large_steps(plan: EliminationPlan) -> set[int]:
    large = [step for step in plan.steps if plan.entries_of(step) > FIRST_ENTRIES]
    return {v for step in large for v in (step.variable, *step.made.scope)}


def _entries(tables: Sequence[_Given], hubs: Scope) -> int:
    """Of the largest table, without hubs."""
    return max(
        (
            math.prod(int(c.max()) + 1 for v, c in zip(*of, strict=True) if v not in hubs)
            for of in tables
        ),
        default=1,
    )


def _written(sizes: Scope, axes: Axes) -> _Given:
    """With a place for every choice."""
    return axes.scope, axes.written(sizes)


def _core_plan(
    sizes: Scope, variables: Scope, given: Sequence[_Given], hubs: Scope
) -> EliminationPlan:
    """Of the core without hubs; its variables are numbered anew."""
    place = {v: i for i, v in enumerate(v for v in variables if v not in hubs)}
    tables = []
    for scope, codes in given:
        kept = [k for k, v in enumerate(scope) if v in place]
        tables.append(Axes(tuple(place[scope[k]] for k in kept), tuple(codes[k] for k in kept)))
    return plan_order([sizes[v] for v in place], tables, limits=_ANY)


def _joined(
    first: EliminationPlan,
    core: EliminationPlan,
    variables: Scope,
    hubs: Scope,
    given: Sequence[_Given],
) -> ConditionedPlan:
    partitions, classes = first.partitions, []
    for h in hubs:
        seen = [partitions.of_none(first.sizes[h])]
        for scope, codes in given:
            seen += [partitions.of(c) for v, c in zip(scope, codes, strict=True) if v == h]
        classes.append(partitions.join(seen))
    parts = []
    for scope, codes in given:
        levels = tuple(level for level, h in enumerate(hubs) if h in scope)
        axes = [scope.index(hubs[level]) for level in levels]
        firsts = (partitions.firsts[classes[level]] for level in levels)
        places = tuple(codes[k][of] for k, of in zip(axes, firsts, strict=True))
        others = (k for k, v in enumerate(scope) if v not in hubs)
        parts.append(_CoreTable(levels, (*axes, *others), places))
    free = tuple(v for v in variables if v not in hubs)
    return ConditionedPlan(first, core, free, hubs, tuple(classes), tuple(parts))


def minimise_conditioned(
    plan: ConditionedPlan, potentials: Potentials, lazy: Sequence[Lazy] = ()
) -> tuple[float, Choice]:
    """Of one problem the least total and a choice that attains it (infinite: none is allowed)."""
    first = plan.first
    eliminated = eliminate(first, potentials)
    unary = {v: potentials.own[v] for v in (*plan.variables, *plan.hubs)}
    tables = [eliminated.table(placed.table)[0] for placed in first.left]
    tables += [one.made_from[0] for one in lazy]
    finish = [None] * len(first.left) + [one.finish for one in lazy]
    core = _Core(plan, unary, tables, finish)
    total, best = core.least()
    known = dict.fromkeys(unary, 0) if best is None else core.choices(best)
    return total + float(eliminated.constant[0]), eliminated.choice(known)


class _Core:
    """The core of one problem."""

    def __init__(
        self,
        plan: ConditionedPlan,
        unary: Mapping[int, FloatArray],
        tables: Sequence[FloatArray],
        finish: Sequence[Callable[[FloatArray], FloatArray] | None],
    ) -> None:
        self.plan, self.unary, self.finish = plan, unary, finish
        self._known: dict[tuple[int, ...], float] = {}
        self.tables = []
        for part, table in zip(plan.parts, tables, strict=True):
            out = table.transpose(part.order)
            for axis, places in enumerate(part.places):
                out = np.take(out, places, axis=axis)
            self.tables.append(np.ascontiguousarray(out))
        self.own = [
            least_of_classes(unary[h], plan.first, of, 1)[0]
            for h, of in zip(plan.hubs, plan.classes, strict=True)
        ]
        # [level][table]: without the hubs that have no value yet
        self._relaxed = [self._without(level) for level in range(len(plan.hubs) + 1)]

    def _without(self, level: int) -> list[FloatArray]:
        out = []
        for part, table in zip(self.plan.parts, self.tables, strict=True):
            free = tuple(axis for axis, of in enumerate(part.levels) if of >= level)
            out.append(table.min(axis=free) if free else table)
        return out

    def least(self) -> tuple[float, Assigned | None]:
        """The least total, and the classes of the hubs that attain it."""
        n_hubs = len(self.plan.hubs)
        roots = np.zeros((1, 0), dtype=np.intp)
        follow, totals = roots, self._totals(roots) if not n_hubs else np.zeros(1)
        for level in range(n_hubs):
            follow = self._children(follow, level)
            totals = self._known_totals(follow)
            follow = follow[np.argsort(totals, kind="stable")[:N_FOLLOWED]]
        known_s, branches = float(totals.min()), roots
        for level in range(n_hubs):
            branches = self._children(branches, level)
            totals = self._known_totals(branches)
            # A bound above a known total cannot lead below it; none is below an infinite one.
            keep = totals <= known_s * (1 + ROUNDING_REL)
            branches, totals = branches[keep], totals[keep]
        if not len(totals) or not math.isfinite(totals.min()):
            return math.inf, None
        best = int(totals.argmin())
        return float(totals[best]), branches[best]

    def _known_totals(self, branches: Assigned) -> FloatArray:
        """`_totals`, of each branch once."""
        keys = list(map(tuple, branches.tolist()))
        new = [i for i, key in enumerate(keys) if key not in self._known]
        if new:
            totals = self._totals(branches[new]).tolist()
            self._known.update(zip((keys[i] for i in new), totals, strict=True))
        return np.array([self._known[key] for key in keys])

    def _children(self, branches: Assigned, level: int) -> Assigned:
        n = self.plan.n_classes(level)
        values = np.tile(np.arange(n), len(branches))[:, None]
        return np.concatenate((np.repeat(branches, n, axis=0), values), axis=1)

    def _totals(self, branches: Assigned) -> FloatArray:
        """[branches]: bounds; of those where all hubs have values, what they cost."""
        plan, level = self.plan, branches.shape[1]
        out = np.zeros(len(branches))
        for h, own in enumerate(self.own):
            out += own[branches[:, h]] if h < level else own.min()
        largest = max([plan.core.largest, *(t.size for t in self._relaxed[0])])
        step = max(1, CHUNK_ENTRIES // largest)
        for start in range(0, len(branches), step):
            some = slice(start, start + step)
            out[some] += eliminate(plan.core, self._potentials(branches[some])).constant
        return out

    def _potentials(self, branches: Assigned) -> Potentials:
        level, tables = branches.shape[1], []
        relaxed = self._relaxed[level]
        for part, table, finish in zip(self.plan.parts, relaxed, self.finish, strict=True):
            own = [of for of in part.levels if of < level]
            different, which = np.unique(branches[:, own], axis=0, return_inverse=True)
            given = table[tuple(different.T)] if own else table[None]
            made = given if finish is None else finish(given)
            tables.append(made[which.ravel()] if own else made)
        unary = tuple(self.unary[v] for v in self.plan.variables)
        return Potentials.given(unary, tables)

    def choices(self, best: Assigned) -> dict[int, int]:
        """Of all variables of the core, where the hubs have these classes."""
        plan, out = self.plan, {}
        for h, partition, k in zip(plan.hubs, plan.classes, best.tolist(), strict=True):
            of_class = plan.first.partitions.codes[partition] == k
            out[h] = int(np.where(of_class, self.unary[h][0], np.inf).argmin())
        core = eliminate(plan.core, self._potentials(best[None]))
        return out | dict(zip(plan.variables, core.choice({}), strict=True))
