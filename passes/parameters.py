"""Parameter candidates: where a parameter is kept, and what turning it into use costs.

A parameter is stored Invariant or Sharded and used however its operators want; the reshard
from storage to use *is* DDP, ZeRO or FSDP, and its period is part of the choice (facts.py).
Several uses at the same placement share one conversion.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import StaticBytes
from autopar.cost.model import CostModel
from autopar.facts import Period, Storage
from autopar.passes.cases import Cases
from autopar.passes.constraints import Limits
from autopar.passes.primitive_costs import primitive_lines
from autopar.passes.reshard import ReshardTables, primitive_calls
from autopar.spec import PREFERENCE, I, S, Spec, TensorType, divides, with_orders, written

PERIODS: tuple[Period, ...] = ("step", "micro", "use")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterMaker:
    """Prices storage and conversions of parameters in several cases.

    `update_s_per_byte` is the optimizer's time per stored byte; `static` its bytes per
    parameter.
    """

    cases: Cases
    limits: Limits
    static: StaticBytes
    update_s_per_byte: float

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The axis sizes of each mesh."""
        return tuple(cost.mesh.sizes for cost in self.cases.meshes)

    def storages(self, name: str, tensor: TensorType, used: Sequence[Spec]) -> Storages:
        """Every storage worth considering: on each axis Invariant, sharded as in some use,
        or sharded along the first factor that divides (for ZeRO)."""
        known: dict[tuple[Spec, ...], tuple[Storage, ...]] = {}
        of_meshes = []
        for sizes in self.sizes:
            specs = self._specs(name, tensor, used, sizes)
            if specs not in known:
                known[specs] = self._with_periods(name, specs)
            of_meshes.append(specs)
        every = tuple(dict.fromkeys(itertools.chain.from_iterable(known.values())))
        marks = [[storage in of for storage in every] for of in map(frozenset, known.values())]
        legal = np.array(marks, dtype=bool).reshape(len(known), len(every))
        place = {specs: i for i, specs in enumerate(known)}
        of_cases = np.array([place[specs] for specs in of_meshes])[self.cases.mesh_of]
        return Storages(every, legal[of_cases])

    def _specs(
        self, name: str, tensor: TensorType, used: Sequence[Spec], sizes: tuple[int, ...]
    ) -> tuple[Spec, ...]:
        """How a parameter may be placed on one mesh."""
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return (fixed.spec,)
        cells = dict.fromkeys(p.cell for spec in used for p in spec.placements if p.is_shard)
        spare = _spare_cell(tensor, sizes)
        if spare is not None:
            cells.setdefault(spare)
        return self._by_recipe(_storage_specs(tensor, tuple(cells), sizes))

    def _with_periods(self, name: str, specs: Sequence[Spec]) -> tuple[Storage, ...]:
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return tuple(dict.fromkeys((fixed, Storage(fixed.spec))))
        kept = (
            Storage(spec, period)
            for spec in specs
            for period in (PERIODS if any(p.is_shard for p in spec.placements) else PERIODS[:1])
        )
        return tuple(s for s in kept if self.limits.storage_allowed(name, s))

    def _by_recipe(self, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Under a ZeRO recipe, only storages sharded on every data axis, if there are any."""
        constraints = self.limits.constraints
        if not constraints.zero:
            return specs
        data = [a for a in self.cases.active_axes if constraints.role(a) == "data"]
        sharded = tuple(s for s in specs if all(s.placements[a].is_shard for a in data))
        return sharded or specs

    def storage_costs(self, tensor: TensorType, storages: Storages) -> tuple[Array, Array, Array]:
        """(update seconds [cases, storages], preference [storages], static bytes [cases,
        storages])."""
        stored = self._local_bytes(tensor, [s.spec for s in storages.every])
        n_local = stored / tensor.itemsize
        preference = np.array(
            [
                sum(PREFERENCE[p.kind] for p in s.spec.placements) * 1e-5
                + PERIODS.index(s.period) * 1e-6
                + bool(s.spec.order) * 1e-6
                for s in storages.every
            ]
        )
        if tensor.has_grad:
            time_s, size_bytes = stored * self.update_s_per_byte, n_local * self.static.total_bytes
        else:
            time_s, size_bytes = np.zeros_like(stored), stored
        time_s[~storages.legal] = np.inf
        return time_s, preference, size_bytes

    def _local_bytes(self, tensor: TensorType, specs: Sequence[Spec]) -> Array:
        """[cases, specs]"""
        is_cut = np.array([[p.is_shard for p in spec.placements] for spec in specs], dtype=bool)
        n_shards = np.where(is_cut, self.cases.sizes[:, None, :], 1).prod(axis=2)
        return (tensor.size_bytes // n_shards).astype(np.float64)

    def conversions(
        self, tables: ReshardTables, storages: Sequence[Storage], uses: Sequence[Spec], n_uses: int
    ) -> tuple[Array, Array, Array]:
        """(seconds per step, tie, bytes) of turning each storage into each use: [cases, storages,
        uses].

        Seconds are infinite where the constraints forbid it. ZeRO-3 gathers at each of
        `n_uses` uses, forward and backward; the others once per distinct use.
        """
        m = self.cases.n_microbatches[:, None, None]
        rows = [tables.index[written(tables.tensors[0], s.spec, self.sizes[0])] for s in storages]
        columns = [tables.index[u] for u in uses]
        distinct = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        paths = path_costs(tables, self.cases.meshes, tuple(distinct))
        at_rows = np.array([distinct[row] for row in rows])
        pick = np.ix_(np.arange(len(self.sizes)), at_rows, np.array(columns))
        of = self.cases.mesh_of
        period = np.array([PERIODS.index(s.period) for s in storages])[:, None]
        forward, backward = paths.forward_s[pick], paths.backward_s[pick]
        per_microbatch_s = np.where(
            period == 1,
            forward[of] + m * backward[of],
            m * n_uses * (2 * forward + backward)[of],
        )
        time_s = np.where(period == 0, paths.bucketed_s[pick][of], per_microbatch_s)
        calls = paths.calls[pick] + 1e-3 * paths.moves[pick]
        tie = calls[of] * np.where(period == 0, 0.01, m)
        used = self._local_bytes(tables.tensors[0], uses)[:, None, :]
        copied, moved = paths.copies[pick] > 0, paths.moves[pick] > 0
        has_grad = float(tables.tensors[0].has_grad)
        n_kept = np.where(
            period == 0, copied + has_grad * moved, np.where(period == 1, copied * 1.0, 0.0)
        )
        size_bytes = used * n_kept[of]
        with_gathers, without = (self._periods_allowed(storages, g) for g in (True, False))
        allowed = np.where(paths.gathers[pick] > 0, with_gathers, without)
        if self.limits.constraints.zero is not None:
            fits = self.limits.fits_recipe
            allowed &= np.array([[fits(s.spec, u) for u in uses] for s in storages], dtype=bool)
        time_s[~(allowed & paths.exist[pick])[of]] = np.inf
        return time_s, tie, size_bytes

    def _periods_allowed(self, storages: Sequence[Storage], gathers: bool) -> NDArray[np.bool_]:
        """[storages, 1]: may a parameter be converted as often?"""
        may = self.limits.period_allowed
        return np.array([[may(s.period, gathers)] for s in storages], dtype=bool)


@dataclass(frozen=True, eq=False)
class Storages:
    """How a parameter may be kept on some mesh, and [cases, storages] in which."""

    every: tuple[Storage, ...]
    legal: NDArray[np.bool_]


def _spare_cell(tensor: TensorType, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """The first factor that all axes together divide; else the first any axis divides.

    A leading factor comes first: its shards are contiguous.
    """
    ordered = sorted(tensor.cells, key=lambda c: (c[1], c[0]))
    for wanted in (math.prod(sizes), *sorted((n for n in sizes if n > 1), reverse=True)):
        for dim, factor in ordered:
            if tensor.dims[dim][factor] % wanted == 0:
                return dim, factor
    return None


@lru_cache(maxsize=1024)
def _storage_specs(
    tensor: TensorType, cells: tuple[tuple[int, int], ...], sizes: tuple[int, ...]
) -> tuple[Spec, ...]:
    """Invariant or sharded along one of `cells` on each axis, in every order."""
    options = [(I,) if n == 1 else (I, *(S(*c) for c in cells)) for n in sizes]
    return tuple(
        spec
        for placements in itertools.product(*options)
        if divides(tensor, placements, sizes)
        for spec in with_orders(placements)
    )


@dataclass(frozen=True, eq=False)
class PathCosts:
    """Sums over the cheapest paths from some specs of a type to all: [meshes, sources, specs]; and
    which paths `exist`."""

    forward_s: Array
    backward_s: Array
    bucketed_s: Array
    calls: Array
    moves: Array
    copies: Array
    gathers: Array
    exist: NDArray[np.bool_]


@lru_cache(maxsize=256)
def path_costs(
    tables: ReshardTables, costs: tuple[CostModel, ...], sources: tuple[int, ...]
) -> PathCosts:
    """What conversions of a parameter of this type cost, on the tables' meshes."""
    graph, size_bytes = tables.graph, tables.size_bytes
    calls, kinds = primitive_calls(graph), np.array([p.kind for p in graph.primitives])
    # A sum of shards among zeros is the whole too.
    copies, gathers = kinds != "identity", np.isin(kinds, ("all_gather", "all_reduce"))
    forward, backward = graph.forward, graph.backward
    lines = primitive_lines(graph, costs)
    seconds, bucketed = lines.seconds(size_bytes), lines.bucketed(size_bytes)
    n_meshes, n_moves = len(costs), len(forward)
    on_all = [
        calls[forward] + calls[backward],
        np.ones(n_moves),
        copies[forward].astype(float),
        gathers[forward].astype(float),
    ]
    values = np.stack(
        [
            seconds[:, forward],
            seconds[:, backward],
            bucketed[:, forward] + bucketed[:, backward],
            *(np.broadcast_to(value, (n_meshes, n_moves)) for value in on_all),
        ],
        axis=1,
    )
    everywhere = range(len(graph.specs))
    time_s, _ = tables.between(sources, everywhere)
    sums = np.moveaxis(tables.along_paths(sources, everywhere, values), 1, 0)
    exist = np.isfinite(time_s)
    return PathCosts(sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], exist)
