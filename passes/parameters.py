"""Parameter candidates: where a parameter is kept, and what turning it into use costs.

A parameter is stored Invariant or Sharded and used however its operators want; the reshard
from storage to use *is* DDP, ZeRO or FSDP, and its period is part of the choice (facts.py).
Several uses at the same placement share one conversion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import StaticBytes
from autopar.cost.model import CostModel
from autopar.facts import Period, Storage
from autopar.passes.constraints import Limits
from autopar.passes.reshard import ReshardTable, primitive_calls, primitive_times_s
from autopar.spec import PREFERENCE, I, S, Spec, TensorType, illegal_reason, local_bytes, written

PERIODS: tuple[Period, ...] = ("step", "micro", "use")
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ParameterMaker:
    """Prices storage and conversions of parameters on one logical mesh.

    `update_s_per_byte` is the optimizer's time per stored byte; `static` its bytes per
    parameter.
    """

    cost: CostModel
    limits: Limits
    n_microbatches: int
    static: StaticBytes
    update_s_per_byte: float

    def storages(self, name: str, tensor: TensorType, used: Sequence[Spec]) -> tuple[Storage, ...]:
        """Every storage worth considering: on each axis Invariant, sharded as in some use,
        or sharded along the first factor that divides (for ZeRO)."""
        fixed = self.limits.constraints.storage.get(name)
        if fixed is not None:
            return tuple(dict.fromkeys((fixed, Storage(fixed.spec))))
        sizes = self.cost.mesh.sizes
        cells = dict.fromkeys(p.cell for spec in used for p in spec.placements if p.is_shard)
        spare = self._spare_cell(tensor)
        if spare is not None:
            cells.setdefault(spare)
        options = [(I,) if n == 1 else (I, *(S(*c) for c in cells)) for n in sizes]
        specs: dict[Spec, None] = {}
        for placements in itertools.product(*options):
            for order in itertools.permutations(range(len(sizes))):
                spec = Spec.of(placements, order)
                if illegal_reason(tensor, spec, sizes) is None:
                    specs.setdefault(spec)
        kept = [
            Storage(spec, period)
            for spec in self._by_recipe(tuple(specs))
            for period in (PERIODS if any(p.is_shard for p in spec.placements) else PERIODS[:1])
        ]
        return tuple(s for s in kept if self.limits.storage_allowed(name, s))

    def _spare_cell(self, tensor: TensorType) -> tuple[int, int] | None:
        """The first factor that all axes together divide; else the first any axis divides.

        A leading factor comes first: its shards are contiguous.
        """
        sizes = self.cost.mesh.sizes
        ordered = sorted(tensor.cells, key=lambda c: (c[1], c[0]))
        for wanted in (self.cost.mesh.n_ranks, *sorted((n for n in sizes if n > 1), reverse=True)):
            for dim, factor in ordered:
                if tensor.dims[dim][factor] % wanted == 0:
                    return dim, factor
        return None

    def _by_recipe(self, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        """Under a ZeRO recipe, only storages sharded on every data axis, if there are any."""
        constraints = self.limits.constraints
        if not constraints.zero:
            return specs
        data = [a for a in self.cost.mesh.active_axes if constraints.role(a) == "data"]
        sharded = tuple(s for s in specs if all(s.placements[a].is_shard for a in data))
        return sharded or specs

    def storage_costs(
        self, tensor: TensorType, storages: Sequence[Storage]
    ) -> tuple[Array, Array, Array]:
        """(update seconds, preference, static bytes) per storage."""
        stored = np.array(
            [local_bytes(tensor, s.spec, self.cost.mesh.sizes) for s in storages], dtype=float
        )
        n_local = stored / tensor.itemsize
        preference = [
            sum(PREFERENCE[p.kind] for p in s.spec.placements) * 1e-5
            + PERIODS.index(s.period) * 1e-6
            + bool(s.spec.order) * 1e-6
            for s in storages
        ]
        if not tensor.has_grad:
            return np.zeros(len(storages)), np.array(preference), stored
        return (
            stored * self.update_s_per_byte,
            np.array(preference),
            n_local * self.static.total_bytes,
        )

    def conversions(
        self, table: ReshardTable, storages: Sequence[Storage], uses: Sequence[Spec], n_uses: int
    ) -> tuple[Array, Array, Array]:
        """(seconds per step, tie, bytes) of turning each storage into each use.

        Seconds are infinite where the constraints forbid it. ZeRO-3 gathers at each of
        `n_uses` uses, forward and backward; the others once per distinct use.
        """
        paths = path_costs(table, self.cost)
        m = self.n_microbatches
        sizes = self.cost.mesh.sizes
        rows = [table.index[written(table.tensor, s.spec, sizes)] for s in storages]
        columns = [table.index[u] for u in uses]
        pick = np.ix_(rows, columns)
        period = np.array([PERIODS.index(s.period) for s in storages])[:, None]
        forward, backward = paths.forward_s[pick], paths.backward_s[pick]
        once = paths.bucketed_s[pick]
        time = np.select(
            [period == 0, period == 1],
            [once, forward + m * backward],
            m * n_uses * (2 * forward + backward),
        )
        calls = paths.calls[pick] + 1e-3 * paths.moves[pick]
        tie = calls * np.where(period == 0, 0.01, float(m))
        used = np.array([local_bytes(table.tensor, u, self.cost.mesh.sizes) for u in uses])
        copied, moved = paths.copies[pick] > 0, paths.moves[pick] > 0
        has_grad = float(table.tensor.has_grad)
        size_bytes = used * np.select(
            [period == 0, period == 1], [copied + has_grad * moved, copied * 1.0], 0.0
        )
        for i, storage in enumerate(storages):
            for j, use in enumerate(uses):
                gathers = paths.gathers[rows[i], columns[j]] > 0
                if not self.limits.conversion_allowed(storage, use, gathers):
                    time[i, j] = np.inf
        return time, tie, size_bytes


@dataclass(frozen=True, eq=False)
class PathCosts:
    """Sums over the cheapest path between every two specs of a tensor type."""

    forward_s: Array
    backward_s: Array
    bucketed_s: Array
    calls: Array
    moves: Array
    copies: Array
    gathers: Array


_PATHS: dict[tuple[int, CostModel], tuple[ReshardTable, PathCosts]] = {}


def path_costs(table: ReshardTable, cost: CostModel) -> PathCosts:
    """What conversions of a parameter of this type cost; kept as long as the table."""
    key = (id(table), cost)
    if key not in _PATHS:
        _PATHS[key] = (table, _path_costs(table, cost))
    return _PATHS[key][1]


def _path_costs(table: ReshardTable, cost: CostModel) -> PathCosts:
    graph, size_bytes = table.graph, table.tensor.size_bytes
    seconds = primitive_times_s(graph, size_bytes, cost.primitive_time_s)
    bucketed = primitive_times_s(graph, size_bytes, cost.bucketed_time_s)
    calls, kinds = primitive_calls(graph), np.array([p.kind for p in graph.primitives])
    copies, gathers = kinds != "identity", kinds == "all_gather"
    forward, backward = graph.forward, graph.backward
    values = {
        "forward_s": seconds[forward],
        "backward_s": seconds[backward],
        "bucketed_s": bucketed[forward] + bucketed[backward],
        "calls": calls[forward] + calls[backward],
        "moves": np.ones(len(forward)),
        "copies": copies[forward].astype(float),
        "gathers": gathers[forward].astype(float),
    }
    sums = table.along_paths(np.stack([*values.values()]))
    return PathCosts(**dict(zip(values, sums, strict=True)))
