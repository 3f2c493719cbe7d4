"""What layers take at least on a view of a stage's devices, whatever lies beside them.

The problem of all operators on the view (`passes/intra/builder.py`) is cut into one of each layer:

    groups     whose operators are all in the layer
    and        the parameters and shared placements that only these groups have
    and        the modes of recompute of its operators; two layers may choose them differently
    left out   reshards from and to other layers

A stage has whole layers. Its placements are a choice of each of these problems, and what is left
out costs nothing or more. So their least sums, or bounds on these, add up to at most its time
(`LayerBounds.free`). Operators of groups that reach into another layer have equal shares
(`least_times_s`). All that can hide is hidden ("least" in `passes/analysis/gathering.py`).

A stage must fit, too. For any price of a byte,

    sum over layers of min (seconds + price x bytes)  -  price x budget

is at most what the stage takes, because its bytes are at most the budget (weak duality of the
Lagrangian). `LayerBounds.budget_bounds` takes the best of a few prices. These problems have a
choice of recompute, if the plans have.

Equal blocks have equal problems. So the problem is that of the folded program, and a layer of c
equal blocks takes c times the optimum of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import numpy as np

from autopar.arrays import Array, BoolArray
from autopar.caching import once
from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.errors import BatchError, InfeasibleError
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Folded
from autopar.passes.inter.layers import Layers, sums_of_ranges
from autopar.passes.intra import Constraints, ProblemBatch, ProblemFamilies
from autopar.passes.solvers.choice import MessageGraph
from autopar.passes.solvers.problem import (
    BUDGET_REL,
    ChoiceProblems,
    Numbers,
    Weights,
)

# Kept operators of a layer that occur equally often in it, and how often.
Alike = tuple[frozenset[int], int]
Part = Literal["whole_s", "work_s"]
# Prices of bytes, in steps per budget. On GPT-39B, the best one for a stage was 1/32 to 1/5.
_STEPS_PER_BUDGET = (1 / 32, 1 / 12, 1 / 5)


class LeastSeconds(NamedTuple):
    """Least seconds of a step: all of them, and those of its microbatches alone."""

    whole_s: Array
    work_s: Array


@dataclass(frozen=True, eq=False)
class _GroupProblems:
    """The problems of some groups in every case of a batch.

    `variables` are those of the batch's problems. `operators` are the kept ones in the groups.
    """

    batch: ProblemBatch
    problems: ChoiceProblems
    variables: Sequence[int]
    operators: frozenset[int]

    @cached_property
    def is_once(self) -> BoolArray:
        """Of a row of the numbers, which costs a step pays once."""
        return self.batch.problems.first.is_once(self.problems, self.variables)

    @cached_property
    def messages(self) -> MessageGraph:
        of = self.problems
        return MessageGraph.of(of.sizes, of.edges, of.layout)


@dataclass(frozen=True, eq=False)
class _Groups:
    """The problem of some groups in one case."""

    every: _GroupProblems
    case: int

    def lower_bounds(self, part: Part, weights: Sequence[Weights], depth: int = 1) -> Array:
        """[weights]: lower bounds on the sums of a part, with as many microbatches in flight."""
        numbers = Numbers.row(self.every.problems, self.case, depth)
        if part == "work_s":  # what is forbidden stays so
            is_without = self.every.is_once & np.isfinite(numbers.cost_s)
            numbers = replace(numbers, cost_s=np.where(is_without, 0.0, numbers.cost_s))
        messages = self._messages[part]
        return np.array(
            [messages.bound_and_choice(numbers.at(w).rows[0], w.cost)[0] for w in weights]
        )

    @cached_property
    def _messages(self) -> dict[Part, MessageGraph]:
        return {part: self.every.messages.fresh_copy() for part in get_args(Part)}


@dataclass(frozen=True, eq=False)
class LayerBounds:
    """The bounds of one program's layers, by view and number of microbatches.

    `folded` knows of parameters what holds at least. `plain` are its problems without recompute,
    unless the user chose it; `recomputing` those with the choice, if there is one. `constraints`
    hold on every view, in every block. `shared_s` are the equal shares of whole operators,
    [2, operators] as in `least_times_s`.
    """

    folded: Folded
    layers: Layers
    hardware: Hardware
    plain: ProblemFamilies
    recomputing: ProblemFamilies
    constraints: Constraints
    shared_s: Array

    @cached_property
    def n_distinct(self) -> int:
        """Operators of the program; equal ones of equal blocks count once."""
        return len({*self.folded.stands_for})

    @once
    def free(self, view: LogicalMesh, m: int) -> LeastSeconds:
        """[layers]: without a memory limit, with `m` microbatches."""
        shares_s, groups = self._shares_s(view, m), self._groups_of(self.plain, view, m)
        equal_s = np.add.reduceat(shares_s, [first for first, _ in self.layers.ranges])
        if groups is None:
            return LeastSeconds(equal_s, equal_s)
        found = [
            np.concatenate([of.lower_bounds(part, [Weights()]) for part in get_args(Part)])
            for of in groups
        ]
        least_s = np.array(self._sums(found)).T + self._rest_s(view, m, groups)
        return LeastSeconds(*np.maximum(least_s, equal_s))

    def budget_bounds(
        self, view: LogicalMesh, m: int, depth: int, budget_bytes: float, step_s: float, part: Part
    ) -> Array:
        """[first layer, last layer]: one of `LeastSeconds` within a budget, with `depth`
        microbatches in flight. `whole_s` is infinite if a stage cannot fit. `step_s` is about what
        stages take.
        """
        n, groups = self.layers.n_layers, self._groups_of(self.recomputing, view, m)
        if groups is None:
            return np.zeros((n, n))
        prices = [step_s / budget_bytes * share for share in _STEPS_PER_BUDGET]
        weights = [Weights(size=price) for price in prices]
        if part == "whole_s":  # else it is known which stages cannot fit
            weights.append(Weights(cost=0.0, size=1.0))
        found = [of.lower_bounds(part, weights, depth) for of in groups]
        priced = list(np.array(self._sums(found)).T)
        least_bytes = priced.pop() if part == "whole_s" else np.zeros(n)
        rest_s, limit_bytes = self._rest_s(view, m, groups), budget_bytes * (1 + BUDGET_REL)
        best = np.zeros((n, n))
        for price, of_layers in zip(prices, priced, strict=True):
            best = np.maximum(best, sums_of_ranges(of_layers + rest_s) - price * limit_bytes)
        is_too_large = np.triu(sums_of_ranges(least_bytes) > limit_bytes)
        return np.where(is_too_large, np.inf, best)

    @once
    def _groups_of(
        self, families: ProblemFamilies, view: LogicalMesh, m: int
    ) -> list[_Groups] | None:
        """The problem of each of `_distinct`.

        None if the whole program is impossible on the view; a stage may have less of it.
        """
        cost = CostModel.of(view, self.hardware)
        try:
            batch = families.of(cost, m, self.constraints.on_view(view))
        except (InfeasibleError, BatchError):
            return None
        case = batch.place(cost, m)
        return [_Groups(self._group_problems(batch, kept), case) for kept in self._distinct]

    @once
    def _group_problems(self, batch: ProblemBatch, kept: frozenset[int]) -> _GroupProblems:
        problem, numbers = batch.problems.first, batch.problems.numbers
        names = {self.folded.analysis.operators[f].name: f for f in kept}
        groups = [
            v
            for v, c in enumerate(problem.candidates)
            if all(member.name in names for member in c.group.members)
        ]
        modes = (of.variable for of in problem.modes if not names.keys().isdisjoint(of.operators))
        inside = {*groups, *(v for v in modes if v is not None)}
        variables = _variables_within(numbers, inside, len(problem.candidates))
        members = (m.name for v in groups for m in problem.candidates[v].group.members)
        return _GroupProblems(
            batch,
            _subproblems(numbers, variables),
            variables,
            frozenset(names[name] for name in members),
        )

    def _sums(self, of_distinct: Sequence[Array]) -> list[Array]:
        """Per layer, the sum of what is known of each part of `_distinct`."""
        place = {kept: i for i, kept in enumerate(self._distinct)}
        nothing = np.zeros_like(of_distinct[0])
        return [
            sum((n * of_distinct[place[kept]] for kept, n in parts), start=nothing)
            for parts in self._parts
        ]

    def _rest_s(self, view: LogicalMesh, m: int, found: Sequence[_Groups]) -> Array:
        """[layers]: equal shares of the operators that are in no group of the layer's parts."""
        of_kept, out = dict(zip(self._distinct, found, strict=True)), []
        shares_s = self._shares_s(view, m)
        for layer, parts in zip(self.layers.ranges, self._parts, strict=True):
            groups = (of_kept[kept] for kept, _ in parts)
            inside = {f for of in groups for f in of.every.operators}
            rest = (shares_s[i] for i in range(*layer) if self.folded.stands_for[i] not in inside)
            out.append(sum(rest))
        return np.array(out, dtype=np.float64)

    def _shares_s(self, view: LogicalMesh, m: int) -> Array:
        """[operators]: seconds of a step in equal shares."""
        whole_s, launches_s = self.shared_s
        shares_s: Array = (whole_s - launches_s) / view.n_ranks + m * launches_s
        return shares_s

    @cached_property
    def _parts(self) -> list[list[Alike]]:
        out = []
        for first, end in self.layers.ranges:
            times = Counter(self.folded.stands_for[first:end])
            by_count: dict[int, set[int]] = {}
            for f, n in times.items():
                by_count.setdefault(n, set()).add(f)
            out.append([(frozenset(of), n) for n, of in by_count.items()])
        return out

    @cached_property
    def _distinct(self) -> list[frozenset[int]]:
        return list(dict.fromkeys(kept for parts in self._parts for kept, _ in parts))


def _variables_within(numbers: ChoiceProblems, inside: set[int], n_groups: int) -> list[int]:
    """These variables, and all that are joined to some of them and to no other group."""
    near: dict[int, set[int]] = {}
    for edge in numbers.edges:
        near.setdefault(edge.u, set()).add(edge.v)
        near.setdefault(edge.v, set()).add(edge.u)
    found, n_before = set(inside), -1
    while len(found) > n_before:  # some are joined to others alone
        n_before = len(found)
        for v in range(n_groups, len(numbers.names)):
            of_v = near.get(v, set())
            if of_v & found and {u for u in of_v if u < n_groups} <= inside:
                found.add(v)
    return sorted(found)


def _subproblems(numbers: ChoiceProblems, variables: Sequence[int]) -> ChoiceProblems:
    """The problems of some variables, and of the edges between them."""
    place = {v: i for i, v in enumerate(variables)}
    edges = (
        replace(edge, u=place[edge.u], v=place[edge.v])
        for edge in numbers.edges
        if edge.u in place and edge.v in place
    )
    return ChoiceProblems(
        numbers.n_problems, tuple(numbers.names[v] for v in variables),
        tuple(numbers.cost_s[v] for v in variables), tuple(numbers.bytes[v] for v in variables),
        tuple(edges), frozenset(place[v] for v in numbers.stored if v in place), is_checked=True,
    )  # fmt: skip
