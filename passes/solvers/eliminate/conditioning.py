"""Elimination with hubs, variables that are joined to almost all others: their values are tried.

A table over a chain's state and several hubs (an encoder's output, a shared weight, a bias that all
blocks read) has as many entries as all their choices multiplied. Without the hubs the chain is
thin. So everything else is eliminated first, which leaves a *core* of few variables and tables. The
core is solved by branch and bound over its hubs, one hub per level (`_Core.least`):

    bound(h1 .. hl)     the core's least total with hubs 1 to l fixed, where every table takes
                        its own minimum over the other hubs                    (`_Core._totals`)

The bound is exact once all hubs have values, where all tables are. All branches of a level are
eliminated together. A few of the best of each level are followed to the end for a first incumbent.
Branches whose bound is above it are pruned. Bounds by parts that need not agree are those of
mini-buckets (Dechter and Rish, "Mini-buckets: a general scheme for bounded inference", Journal of
the ACM 50, 2003).

Some tables of the core may be given by what they are made from (`Lazy`): of N copies of a block the
table of one copy. Bounds of branches need a bound of its power; the power itself is computed of the
branches that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.eliminate.elimination import eliminate, least_of_classes
from autopar.passes.solvers.eliminate.elimination_order import (
    EliminationPlan,
    TableLimits,
    TooWide,
    plan_order,
)
from autopar.passes.solvers.problem import Axes, Choice, Potentials, Scope

# Steps of more than FIRST_ENTRIES entries are left to the core. Hubs are added until the core's
# tables without them have at most CORE_ENTRIES, or there are MOST_HUBS.
FIRST_ENTRIES = 2**25
CORE_ENTRIES = 2**17
MOST_HUBS = 4
HUBS_TRIED = 6
# Branches of each level that are followed for a first incumbent.
N_FOLLOWED = 2
# Branches of which all hubs have values are tried so many at once, the lowest bounds first.
N_AT_ONCE = 8
# Table entries of the branches that are eliminated at once.
CHUNK_ENTRIES = 2**22
# Table entries of all branches that may be eliminated: some seconds.
MOST_ENTRIES = 2**32
# Branches are kept whose bound only rounding may have lifted above the incumbent.
ROUNDING_REL = 1e-12

_ANY = TableLimits(2**62, 2**62, 2**62)

# A table's variables, and per axis the index of every choice.
_Given = tuple[Scope, tuple[Codes, ...]]
Assigned = Codes  # [branches, level]: the classes of the first hubs


@dataclass(frozen=True, eq=False)
class Lazy:
    """A table of the core, made from another over the same axes by `finish`, per branch. `bound`
    makes lower bounds of it, at less cost."""

    made_from: Array
    finish: Callable[[Array], Array]
    bound: Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class _CoreTable:
    """How a table of the core mentions hubs: the `levels` of its hubs, the `order` of its axes with
    hubs first, and per hub the index of every class on its axis (`places`)."""

    levels: tuple[int, ...]
    order: tuple[int, ...]
    places: tuple[Codes, ...]


@dataclass(frozen=True, eq=False)
class ConditionedPlan:
    """`first` leaves the core. `core` is the plan of the core without its hubs, over `variables`.
    `classes[level]` is the partition of a hub's choices that the core distinguishes; `parts` are
    the core's tables."""

    first: EliminationPlan
    core: EliminationPlan
    variables: Scope
    hubs: Scope
    classes: tuple[int, ...]
    parts: tuple[_CoreTable, ...]

    def n_classes(self, level: int) -> int:
        return self.first.partitions.n_classes(self.classes[level])

    def within(self, limits: TableLimits) -> bool:
        """Are the tables within `limits`? The number of branches is known only after the search."""
        return self.first.within(limits) and self.core.within(limits)


def plan_conditioned(
    sizes: Sequence[int], tables: Iterable[Axes], lazy: Iterable[Axes] = (),
    kept: Iterable[int] = (), limits: TableLimits | None = None,
) -> ConditionedPlan:  # fmt: skip
    """A plan for tables and `lazy` ones, in which no variable of `kept` is a hub.

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
    given = [
        *((p.scope, p.codes) for p in first.left),
        *((axes.scope, axes.written(sizes)) for axes in lazy),
    ]
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
    """The entries of the largest table, without the axes of hubs."""
    return max(
        (
            math.prod(int(c.max()) + 1 for v, c in zip(*of, strict=True) if v not in hubs)
            for of in tables
        ),
        default=1,
    )


def _core_plan(
    sizes: Scope, variables: Scope, given: Sequence[_Given], hubs: Scope
) -> EliminationPlan:
    """The plan of the core without hubs. Its variables are numbered anew."""
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
    """The whole plan, with the classes of hubs and how the tables of the core mention them."""
    partitions, classes = first.partitions, []
    for h in hubs:
        seen = [partitions.one_class(first.sizes[h])]
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
    """The least total of one problem, and a choice that attains it (infinite: none is allowed).

    Raises `TooWide` where too many branches are left to try.
    """
    first = plan.first
    eliminated = eliminate(first, potentials)
    unary = {v: potentials.own[v] for v in (*plan.variables, *plan.hubs)}
    tables = [eliminated.table(placed.table)[0] for placed in first.left]
    tables += [one.made_from[0] for one in lazy]
    core = _Core(plan, unary, tables, [*(None for _ in first.left), *lazy])
    total, best = core.least()
    known = dict.fromkeys(unary, 0) if best is None else core.choices(best)
    return total + float(eliminated.constant[0]), eliminated.choice(known)


class _Core:
    """Branch and bound on the core of one problem."""

    def __init__(
        self,
        plan: ConditionedPlan,
        unary: Mapping[int, Array],
        tables: Sequence[Array],
        lazy: Sequence[Lazy | None],
    ) -> None:
        self.plan, self.unary, self.lazy = plan, unary, lazy
        self._known: dict[tuple[int, ...], float] = {}
        self._n_entries = 0
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
        # [level][table]: minimised over the hubs that have no value yet
        self._relaxed = [self._without(level) for level in range(len(plan.hubs) + 1)]

    def _without(self, level: int) -> list[Array]:
        out = []
        for part, table in zip(self.plan.parts, self.tables, strict=True):
            free = tuple(axis for axis, of in enumerate(part.levels) if of >= level)
            out.append(table.min(axis=free) if free else table)
        return out

    def least(self) -> tuple[float, Assigned | None]:
        """The least total, and the classes of the hubs that attain it; None: none is allowed."""
        n_hubs = len(self.plan.hubs)
        followed = np.zeros((1, 0), dtype=np.intp)
        for level in range(n_hubs):
            followed = self._children(followed, level)
            bounds = self._known_bounds(followed)
            followed = followed[np.argsort(bounds, kind="stable")[:N_FOLLOWED]]
        best_s, best = self._best_of(followed)
        branches, bounds = np.zeros((1, 0), dtype=np.intp), np.zeros(1)
        for level in range(n_hubs):
            branches = self._children(branches, level)
            bounds = self._known_bounds(branches)
            # Prune above the incumbent; an infinite one prunes nothing.
            keep = bounds <= best_s * (1 + ROUNDING_REL)
            branches, bounds = branches[keep], bounds[keep]
        order = np.argsort(bounds, kind="stable") if n_hubs else ()
        for start in range(0, len(order), N_AT_ONCE):
            some = order[start : start + N_AT_ONCE]
            some = some[bounds[some] <= best_s * (1 + ROUNDING_REL)]
            if not len(some):
                break
            found_s, found = self._best_of(branches[some])
            if found_s < best_s:
                best_s, best = found_s, found
        return best_s, best

    def _best_of(self, branches: Assigned) -> tuple[float, Assigned | None]:
        """The least total of branches whose hubs have values; None: none is allowed."""
        totals = self._totals(branches)
        k = int(totals.argmin())
        return (float(totals[k]), branches[k]) if math.isfinite(totals[k]) else (math.inf, None)

    def _known_bounds(self, branches: Assigned) -> Array:
        """Lower bounds on what branches cost, computed once per branch."""
        keys = list(map(tuple, branches.tolist()))
        new = [i for i, key in enumerate(keys) if key not in self._known]
        if new:
            totals = self._totals(branches[new], exact=False).tolist()
            self._known.update(zip((keys[i] for i in new), totals, strict=True))
        return np.array([self._known[key] for key in keys])

    def _children(self, branches: Assigned, level: int) -> Assigned:
        n = self.plan.n_classes(level)
        values = np.tile(np.arange(n), len(branches))[:, None]
        return np.concatenate((np.repeat(branches, n, axis=0), values), axis=1)

    def _totals(self, branches: Assigned, exact: bool = True) -> Array:
        """[branches]: lower bounds on what they cost; `exact` ones where all hubs have values."""
        plan, level = self.plan, branches.shape[1]
        out = np.zeros(len(branches))
        for h, own in enumerate(self.own):
            out += own[branches[:, h]] if h < level else own.min()
        largest = max([plan.core.largest, *(t.size for t in self._relaxed[0])])
        self._n_entries += len(branches) * largest
        if self._n_entries > MOST_ENTRIES:
            raise TooWide(
                f"branches on {len(plan.hubs)} hubs need more than {MOST_ENTRIES:.3g} entries",
                hint="solve the ILP instead",
            )
        step = max(1, CHUNK_ENTRIES // largest)
        for start in range(0, len(branches), step):
            some = slice(start, start + step)
            out[some] += eliminate(plan.core, self._potentials(branches[some], exact)).constant
        return out

    def _potentials(self, branches: Assigned, exact: bool = True) -> Potentials:
        level, tables = branches.shape[1], []
        relaxed = self._relaxed[level]
        for part, table, lazy in zip(self.plan.parts, relaxed, self.lazy, strict=True):
            own = [of for of in part.levels if of < level]
            different, which = np.unique(branches[:, own], axis=0, return_inverse=True)
            given = table[tuple(different.T)] if own else table[None]
            made = given if lazy is None else (lazy.finish if exact else lazy.bound)(given)
            tables.append(made[which.ravel()] if own else made)
        unary = tuple(self.unary[v] for v in self.plan.variables)
        return Potentials.given(unary, tables)

    def choices(self, best: Assigned) -> dict[int, int]:
        """The choices of all variables of the core, given the classes of the hubs."""
        plan, out = self.plan, {}
        for h, partition, k in zip(plan.hubs, plan.classes, best.tolist(), strict=True):
            of_class = plan.first.partitions.codes[partition] == k
            out[h] = int(np.where(of_class, self.unary[h][0], np.inf).argmin())
        core = eliminate(plan.core, self._potentials(best[None]))
        return out | dict(zip(plan.variables, core.choice({}), strict=True))
