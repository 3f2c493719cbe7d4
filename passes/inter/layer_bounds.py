"""What layers take at least in a step on some devices, whatever lies beside them.

The problem of all operators on a view (`passes/intra/builder.py`) is cut into one of each layer:

    groups     whose operators are all in the layer
    and        the parameters and shared placements that only these groups read
    left out   reshards from and to other layers

A pipeline's stage has whole layers. Its placements are a choice of each of these problems, and what
is left out costs nothing or more. So the sum of the layers' optima is at most what the stage takes.
Operators of groups that reach into another layer have equal shares (`least_times_s`). All that can
hide is hidden ("least" in `passes/analysis/gathering.py`).

Equal blocks have equal problems. So the problem is that of the folded program, and a layer of c
equal blocks takes c times the optimum of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.errors import BatchError, InfeasibleError
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Folded
from autopar.passes.inter.layers import Layers
from autopar.passes.intra import Constraints, IntraOpProblem, ProblemFamilies
from autopar.passes.solvers.eliminate import (
    TableLimits,
    TooWide,
    minimise,
    plan_elimination,
)
from autopar.passes.solvers.problem import ChoiceProblem, Potentials, Weights

Array = NDArray[np.float64]
# Kept operators of a layer that occur equally often in it, and how often.
Part = tuple[frozenset[int], int]


@dataclass(frozen=True, eq=False)
class LayerBounds:
    """Least seconds of a step in every layer, by devices and numbers of microbatches.

    `folded` knows of parameters what holds at least; `problems` are its problems. `shared_s` are
    the equal shares of whole operators, [2, operators] as in `least_times_s`.
    """

    folded: Folded
    layers: Layers
    dtype: torch.dtype
    problems: ProblemFamilies
    constraints: Callable[[LogicalMesh], Constraints]
    views: Sequence[LogicalMesh]
    shared_s: Array
    _known: dict[tuple[int, int], Array] = field(default_factory=dict, init=False)

    def steps_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """[layers]: of the best view of so many devices for each; infinite if there is no view."""
        key = n_ranks, n_microbatches
        if key not in self._known:
            none = np.full(self.layers.n_layers, np.inf)
            views = (view for view in self.views if view.n_ranks == n_ranks)
            found = (self._on_view(view, n_microbatches) for view in views)
            self._known[key] = reduce(np.minimum, found, none)
        return self._known[key]

    def _on_view(self, view: LogicalMesh, m: int) -> Array:
        cost, n_ranks = CostModel(view, self.dtype), view.n_ranks
        whole_s, launches_s = self.shared_s
        shares_s = (whole_s - launches_s) / n_ranks + m * launches_s
        equal_s = np.array([shares_s[first:end].sum() for first, end in self.layers.ranges])
        try:
            problem = self.problems.of(cost, m, self.constraints(view)).of(cost, m)
        except (InfeasibleError, BatchError):
            return equal_s  # a stage may have less than what makes the whole impossible
        optima = {kept: self._optimum(problem, kept) for kept in self._distinct}
        out = []
        for (first, end), parts in zip(self.layers.ranges, self._parts, strict=True):
            inside = {f for kept, _ in parts for f in optima[kept][1]}
            rest_s = sum(
                shares_s[i] for i in range(first, end) if self.folded.stands_for[i] not in inside
            )
            out.append(rest_s + sum(n * optima[kept][0] for kept, n in parts))
        return np.maximum(out, equal_s)

    def _optimum(
        self, problem: IntraOpProblem, kept: frozenset[int]
    ) -> tuple[float, frozenset[int]]:
        """The least seconds of the groups within these operators, and which of the operators are in
        such groups."""
        names = {self.folded.analysis.operators[f].name: f for f in kept}
        groups = [
            v
            for v, c in enumerate(problem.candidates)
            if all(member.name in names for member in c.group.members)
        ]
        part = _within(problem.numbers, frozenset(groups), len(problem.candidates))
        try:
            found_s, _ = minimise(
                plan_elimination(part, TableLimits()), Potentials.of(part, Weights())
            )
        except TooWide:
            return 0.0, frozenset()
        members = (m.name for v in groups for m in problem.candidates[v].group.members)
        return found_s, frozenset(names[name] for name in members)

    @cached_property
    def _parts(self) -> list[list[Part]]:
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


def _within(numbers: ChoiceProblem, groups: frozenset[int], n_groups: int) -> ChoiceProblem:
    """The problem of these groups, and of the other variables that only they are joined to."""
    beside: dict[int, set[int]] = {}
    for edge in numbers.edges:
        beside.setdefault(edge.u, set()).add(edge.v)
        beside.setdefault(edge.v, set()).add(edge.u)
    inside = set(groups)
    inside.update(
        v
        for v in range(n_groups, numbers.n_variables)
        if (near := beside.get(v, set())) & groups and {u for u in near if u < n_groups} <= groups
    )
    order = sorted(inside)
    place = {v: i for i, v in enumerate(order)}
    edges = (
        replace(edge, u=place[edge.u], v=place[edge.v])
        for edge in numbers.edges
        if edge.u in place and edge.v in place
    )
    return ChoiceProblem(
        tuple(numbers.names[v] for v in order), tuple(numbers.cost_s[v] for v in order),
        tuple(numbers.tie[v] for v in order), tuple(numbers.bytes[v] for v in order),
        tuple(edges), is_checked=True,
    )  # fmt: skip
