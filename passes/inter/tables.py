"""What every range of layers costs as a pipeline stage, on one logical view of its devices.

The placement problem of the folded program (`passes/analysis/folding.py`) is solved once per view
and number of microbatches m. Its numbers are attributed to operators (`attribution.py`):

    time        per microbatch: operators, reshards, and the parameter conversions that run in
                every microbatch (ZeRO-2 and ZeRO-3)
    once        per step: the optimizer's update, and conversions that run once (ZeRO-1, data
                parallel)
    static      bytes of parameters, gradients, optimizer state and converted copies
    activation  bytes that one microbatch keeps for backward

    m sum(time) + sum(once) = the objective,   sum(static) + sum(activation) = the bytes

of the folded program, exactly. A range of layers costs the sum of its operators, and each parameter
that it uses once (`StageTable.ranges`). Two costs come on top:

    messages    depend on where in its node a stage begins (`StageTable.messages`)
    reshards    of the values that cross its ends (`StageTable.conversions`). Recipes pay them in
                full, because their placements are given. A searched stage may pay as little as
                nothing, because a stage that is solved alone places its ends otherwise. The search
                learns how much it pays (`estimates.py`)

A price per byte trades memory for time (`passes/solvers/choice/hull.py`). The placements at some
corners of the hull, for several depths of microbatches in flight, become configurations of their
own, so the stage search weighs time against memory. Placements may also recompute
(`passes/intra/recompute_choice.py`). The hull is not the whole Pareto set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.errors import BatchError, InfeasibleError
from autopar.mesh import Link, LogicalMesh
from autopar.passes.analysis import Folded, Recomputable, is_searched
from autopar.passes.inter.attribution import PARTS, Attribution, BatchOwners, Shared, Traffic
from autopar.passes.inter.layers import Layers
from autopar.passes.intra import Constraints, IntraOpProblem, Prices, ProblemBatch, ProblemFamilies
from autopar.passes.reshard import priced_alike
from autopar.passes.solvers.choice import hull_corners_of, solve
from autopar.passes.solvers.problem import Choice, Infeasible, compiled

Array = NDArray[np.float64]
N_CORNERS = 5


@dataclass(frozen=True, eq=False)
class StageTable:
    """One placement of the program on a view, and what its ranges of layers cost.

    sums          [parts]: sums over all operators of the whole program
    sums_before   [parts, layers + 1]: sums over the operators before each layer, and over all
    shared        the parameters that are used in several places
    leave_s       [layers - 1]: what the stage before each boundary between layers pays to reshard
                  the values that cross
    enter_s       [layers - 1]: the same for the stage after it
    traffic       the messages over each boundary
    """

    view: LogicalMesh
    layers: Layers
    sums: Array
    sums_before: Array
    shared: tuple[Shared, ...]
    leave_s: Array
    enter_s: Array
    traffic: Traffic

    def total(self, part: str) -> float:
        """One part of the whole program, as one stage."""
        alone = float(self.sums[PARTS.index(part)])
        return alone + sum(s.values.get(part, 0.0) for s in self.shared)

    def bytes_in_flight(self, depth: int) -> float:
        """Bytes of the whole program as one stage, with `depth` microbatches in flight."""
        return self.total("static") + depth * self.total("activation")

    @staticmethod
    def of(
        view: LogicalMesh, layers: Layers, parts: Mapping[str, Array], shared: tuple[Shared, ...],
        leave_s: Array, enter_s: Array, traffic: Traffic,
    ) -> StageTable:  # fmt: skip
        """From `parts`, each [operators of the whole program]."""
        every = np.stack([parts[part] for part in PARTS])
        before = np.concatenate((np.zeros((len(PARTS), 1)), np.cumsum(every, axis=1)), axis=1)
        before = before[:, [0, *layers.ends]]
        return StageTable(
            view, layers, every.sum(axis=1), before, shared, leave_s, enter_s, traffic
        )

    def ranges(self, part: str) -> Array:
        """One part of every stage, [first layer, last layer]; 0 below the diagonal."""
        return self._ranges[PARTS.index(part)]

    @cached_property
    def _ranges(self) -> Array:
        """[parts, first layer, last layer]"""
        out = self.sums_before[:, None, 1:] - self.sums_before[:, :-1, None]
        for shared in self.shared:
            used = np.zeros(self.layers.n_layers + 1, dtype=np.int64)
            used[1 + np.searchsorted(self.layers.ends, shared.operators, side="right")] = 1
            n_before = np.cumsum(used)
            touched = n_before[None, 1:] > n_before[:-1, None]
            values = np.array([shared.values.get(part, 0.0) for part in PARTS])
            out += values[:, None, None] * touched
        return np.triu(np.maximum(out, 0.0))

    def conversions(self) -> Array:
        """Seconds per microbatch to reshard what crosses both ends, [first layer, last layer]."""
        enter, leave = np.concatenate(([0.0], self.enter_s)), np.concatenate((self.leave_s, [0.0]))
        return np.triu(enter[:, None] + leave[None, :])

    def messages(self, before: Link, after: Link) -> Array:
        """Seconds to receive a microbatch and its gradient, [first layer, last layer].

        A stage waits for what it receives: values over the link `before`, gradients over `after`.
        """
        forward = np.concatenate(([0.0], self.traffic.forward_s(before)))
        backward = np.concatenate((self.traffic.backward_s(after), [0.0]))
        return np.triu(forward[:, None] + backward[None, :])


@dataclass(frozen=True)
class TableRequest:
    """Asks for the tables of one view.

    If the fastest placements need more than `enough_bytes`, leaner ones are found for each of
    `depths`, the numbers of microbatches in flight. With `recomputes`, leaner placements may
    recompute what the maker allows.
    """

    view: LogicalMesh
    constraints: Constraints
    depths: tuple[int, ...] = ()
    enough_bytes: float = 0.0
    recomputes: bool = False

    def is_tight(self, fastest: StageTable) -> bool:
        """Are leaner placements useful?"""
        return bool(self.depths) and fastest.bytes_in_flight(max(self.depths)) > self.enough_bytes


class _PlacedTable(NamedTuple):
    """Placements of the folded program, and what they cost."""

    choice: Choice
    table: StageTable


@dataclass(frozen=True)
class TableMaker:
    """Makes the stage tables of one program.

    `views` and `counts` (of microbatches) are those that will be asked for. `pricing` maps the real
    machine to the one that placements are chosen for, if that is another (recipes). `recomputable`
    is what may be recomputed; each of its ranges lies within a block of the folded program.
    """

    folded: Folded
    layers: Layers
    dtype: torch.dtype
    optimizer: str
    views: tuple[LogicalMesh, ...] = ()
    counts: tuple[int, ...] = ()
    pricing: Callable[[CostModel], CostModel] | None = None
    recomputable: Recomputable | None = None
    prices: Prices = field(default_factory=Prices)
    _layouts: dict[Hashable, tuple[Hashable, Choice]] = field(default_factory=dict, init=False)
    _fastest: dict[Hashable, _PlacedTable | None] = field(default_factory=dict, init=False)
    _owners: dict[ProblemBatch, BatchOwners] = field(default_factory=dict, init=False)

    @cached_property
    def _problems(self) -> ProblemFamilies:
        """Problems without recompute, unless the user gave a mode."""
        return self._families(None if is_searched(self.recomputable) else self.recomputable)

    @cached_property
    def _recomputing(self) -> ProblemFamilies:
        return self._families(self.recomputable)

    def _families(self, recomputable: Recomputable | None) -> ProblemFamilies:
        real = tuple(CostModel(view, self.dtype) for view in self.views)
        abstract = tuple(map(self.pricing, real)) if self.pricing is not None else ()
        return ProblemFamilies(
            self.folded.analysis, self.optimizer, (real, abstract), self.counts,
            recomputable=recomputable, prices=self.prices,
        )  # fmt: skip

    def recipe(
        self, view: LogicalMesh, n_microbatches: int, constraints: Constraints
    ) -> StageTable:
        """The table of a recipe: placed on the machine of `pricing`, priced on the real one.

        Raises `InfeasibleError` if the constraints leave no placement, or forbid the chosen one on
        the real machine, and `BatchError` if the batch does not divide.
        """
        cost = CostModel(view, self.dtype)
        batch = self._problems.of(cost, n_microbatches, constraints)
        layout = self._layout(cost, batch.problems.first, n_microbatches, constraints)
        (table,) = self._tables(batch, [(view, batch.place(cost, n_microbatches), layout)])
        if not all(math.isfinite(table.total(part)) for part in PARTS):
            raise _contradictory()  # a parameter's cheapest conversion is forbidden here
        return table

    def tables_for(
        self, requests: Sequence[TableRequest], n_microbatches: int
    ) -> list[list[StageTable]]:
        """The tables of each request: the fastest placements first, then leaner ones if the request
        is tight.

        A request has no tables if its constraints leave nothing or the batch does not divide.
        """
        out: list[list[StageTable]] = [[] for _ in requests]
        together: dict[int, list[int]] = {}
        batches: dict[int, ProblemBatch] = {}
        for i, one in enumerate(requests):
            cost = CostModel(one.view, self.dtype)
            try:
                batch = self._problems.of(cost, n_microbatches, one.constraints)
            except (InfeasibleError, BatchError):
                continue  # impossible on this view, or with this many microbatches
            batches[id(batch)] = batch
            together.setdefault(id(batch), []).append(i)
        for key, of_batch in together.items():
            found = self._tables_of_batch(
                [requests[i] for i in of_batch], batches[key], n_microbatches
            )
            for i, tables in zip(of_batch, found, strict=True):
                out[i] = tables
        return out

    def _tables_of_batch(
        self, requests: Sequence[TableRequest], batch: ProblemBatch, m: int
    ) -> list[list[StageTable]]:
        """The tables of requests whose problems are in one batch, found together."""
        models = [CostModel(one.view, self.dtype) for one in requests]
        fastest_of = self._fastest_of(requests, batch, m)
        known = [{} if one is None else {one.choice: one.table} for one in fastest_of]
        tight = [i for i, one in enumerate(fastest_of) if one and requests[i].is_tight(one.table)]
        if tight:
            families = self._recomputing if requests[tight[0]].recomputes else self._problems
            leaner = families.of(models[tight[0]], m, requests[tight[0]].constraints)
            fastest = [one.choice if one and leaner is batch else None for one in fastest_of]
        for k in range(max((len(requests[i].depths) for i in tight), default=0)):
            rows = [i for i in tight if k < len(requests[i].depths)]
            at = [leaner.place(models[i], m) for i in rows]
            problems = leaner.problems.in_flight(at, [requests[i].depths[k] for i in rows])
            corners = hull_corners_of(problems, N_CORNERS, [fastest[i] for i in rows])
            new = []
            for i, case, found in zip(rows, at, corners, strict=True):
                assert not isinstance(found, Infeasible), "the fastest is allowed"
                fastest[i] = found[0]
                new += [(i, case, choice) for choice in found if choice not in known[i]]
            tables = self._tables(
                leaner, [(requests[i].view, case, choice) for i, case, choice in new]
            )
            for (i, _, choice), one in zip(new, tables, strict=True):
                known[i][choice] = one
        return [list(found.values()) for found in known]

    def _fastest_of(
        self, requests: Sequence[TableRequest], batch: ProblemBatch, m: int
    ) -> list[_PlacedTable | None]:
        """The fastest placements on each view, cached; None where no placement is allowed."""
        keys = [(batch, one.view, m) for one in requests]
        new = [i for i, key in enumerate(keys) if key not in self._fastest]
        if new:
            at = [batch.place(CostModel(requests[i].view, self.dtype), m) for i in new]
            found = hull_corners_of(batch.problems.in_flight(at, [1] * len(new)), 1)
            chosen = [
                (i, case, corners[0])
                for i, case, corners in zip(new, at, found, strict=True)
                if not isinstance(corners, Infeasible)
            ]
            tables = self._tables(batch, [(requests[i].view, case, c) for i, case, c in chosen])
            self._fastest.update(dict.fromkeys(keys[i] for i in new))
            for (i, _, choice), one in zip(chosen, tables, strict=True):
                self._fastest[keys[i]] = _PlacedTable(choice, one)
        return [self._fastest[key] for key in keys]

    def _layout(
        self, cost: CostModel, problem: IntraOpProblem, m: int, constraints: Constraints
    ) -> Choice:
        """A recipe's placements: the fastest on the machine of `pricing`.

        They are the same for all numbers of microbatches that leave the same choices.
        """
        assert self.pricing is not None
        key = (priced_alike(cost), repr(constraints))
        known = self._layouts.get(key)
        if known is None or known[0] != problem.structure:
            other = self.pricing(cost)
            abstract = self._problems.of(other, m, constraints).of(other, m)
            assert abstract.structure == problem.structure, "machines differ in numbers alone"
            found = solve(abstract.numbers)
            if isinstance(found, Infeasible):
                raise _contradictory()
            known = self._layouts[key] = (problem.structure, found.choice)
        return known[1]

    def _tables(
        self, batch: ProblemBatch, chosen: Sequence[tuple[LogicalMesh, int, Choice]]
    ) -> list[StageTable]:
        """The tables of solved choices, given as (view, index of the problem, choice)."""
        if not chosen:
            return []
        if batch not in self._owners:
            self._owners[batch] = BatchOwners(self.folded, batch, self.layers.crossing)
        cases, choices = np.array([c for _, c, _ in chosen]), np.array([c for _, _, c in chosen])
        attribution = Attribution(self._owners[batch], cases, choices)
        read = zip(chosen, attribution.parts(), attribution.crossings(), strict=True)
        return [
            StageTable.of(view, self.layers, parts, shared, leave_s, enter_s, traffic)
            for (view, _, _), (parts, shared), (leave_s, enter_s, traffic) in read
        ]


def _contradictory() -> InfeasibleError:
    return InfeasibleError(
        "no plan satisfies the constraints together", hint="relax forbid, force or the recipe"
    )


def undominated(configs: Sequence[StageTable]) -> list[StageTable]:
    """The tables that no other table with as many devices dominates; of equal ones, the first.

    A table dominates another if no part of any range of layers costs more, nor any message.
    """
    kept: list[StageTable] = []
    for n_ranks in dict.fromkeys(c.view.n_ranks for c in configs):
        same = [c for c in configs if c.view.n_ranks == n_ranks]
        tables = np.stack(
            [
                np.concatenate(
                    [
                        *(c.ranges(part).ravel() for part in PARTS),
                        c.conversions().ravel(),
                        c.traffic.numbers.ravel(),
                    ]
                )
                for c in same
            ]
        )
        kept += itertools.compress(same, ~_dominated(tables))
    return kept


@compiled
def _dominated(rows: Array) -> NDArray[np.bool_]:
    """Which rows of [rows, numbers] another row dominates: it is nowhere greater, and it is less
    somewhere or comes first."""
    n_rows, n_numbers = rows.shape
    out = np.zeros(n_rows, dtype=np.bool_)
    for i in range(n_rows):
        for other in range(n_rows):
            at = 0
            while at < n_numbers and rows[other, at] <= rows[i, at]:
                at += 1
            if at == n_numbers and other != i:
                out[i] |= other < i or (rows[other] < rows[i]).any()
    return out
