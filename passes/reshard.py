"""Cheapest paths between specs: which moves turn one placement of a tensor into another.

Shortest paths in the graph of single moves (`move_graph.py`) between all pairs of specs, once per
tensor type (Floyd-Warshall); weights are forward plus backward time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.moves import COLLECTIVES
from autopar.passes.move_graph import MoveGraph, PrimitiveTime, Step, clear_graphs, move_graph
from autopar.spec import Spec, TensorType

Array = NDArray[np.float64]


def primitive_times_s(graph: MoveGraph, size_bytes: int, time_of: PrimitiveTime) -> Array:
    """Seconds of each of the graph's primitives on a tensor of `size_bytes` in all."""
    return np.array(
        [
            time_of(p.kind, size_bytes // p.n_shards, p.axes) if p.kind != "identity" else 0.0
            for p in graph.primitives
        ]
    )


def primitive_calls(graph: MoveGraph) -> Array:
    """1 for a collective, else 0."""
    return np.array([float(p.kind in COLLECTIVES) for p in graph.primitives])


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """All-pairs cheapest reshards of one tensor type.

    `time_s[i, j]` is the least forward + backward time from `specs[i]` to `specs[j]`,
    `tie[i, j]` the collectives on that path (the tie-break).
    """

    tensor: TensorType
    graph: MoveGraph
    time_s: Array
    tie: Array
    next_hop: NDArray[np.int32]

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        return self.graph.specs

    @cached_property
    def index(self) -> Mapping[Spec, int]:
        return self.graph.index

    @staticmethod
    def build(
        tensor: TensorType,
        sizes: tuple[int, ...],
        time_of: PrimitiveTime,
        no_reduce_scatter: bool = False,
    ) -> ReshardTable:
        """Search all paths; `no_reduce_scatter` leaves out moves that reduce_scatter."""
        graph = move_graph(tensor, sizes)
        n = len(graph.specs)
        kept = np.ones(len(graph.source), dtype=bool)
        if no_reduce_scatter:
            scatters = np.array([p.kind == "reduce_scatter" for p in graph.primitives], dtype=bool)
            kept = ~(scatters[graph.forward] | scatters[graph.backward])
        source, target = graph.source[kept], graph.target[kept]
        forward, backward = graph.forward[kept], graph.backward[kept]
        seconds = primitive_times_s(graph, tensor.size_bytes, time_of)
        calls = primitive_calls(graph)
        time, tie = np.full((n, n), np.inf), np.zeros((n, n))
        np.fill_diagonal(time, 0.0)
        time[source, target] = seconds[forward] + seconds[backward]
        # A move that costs nothing still counts a little: no detours.
        tie[source, target] = calls[forward] + calls[backward] + 1e-3
        next_hop = np.tile(np.arange(n, dtype=np.int32), (n, 1))
        _all_pairs(time, tie, next_hop)
        return ReshardTable(tensor, graph, time, tie, next_hop)

    def path(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The moves of the cheapest reshard; empty when the specs are equal."""
        at, goal, out = self.index[source], self.index[target], []
        while at != goal:
            following = int(self.next_hop[at, goal])
            out.append(self.graph.step(self.tensor, at, following))
            at = following
        return tuple(out)

    def along_paths(self, move_values: Array) -> Array:
        """[k, moves] -> [k, specs, specs]: sums over the moves of the path of every pair."""
        n = len(self.specs)
        values = np.zeros((n, n, len(move_values)))
        values[self.graph.source, self.graph.target] = move_values.T
        goal = np.broadcast_to(np.arange(n), (n, n))
        at = np.ascontiguousarray(goal.T)
        total = np.zeros_like(values)
        while (moving := at != goal).any():
            following = self.next_hop[at, goal]
            total[moving] += values[at[moving], following[moving]]
            at = np.where(moving, following, at)
        return np.moveaxis(total, 2, 0)


def reshard_table(
    tensor: TensorType, cost: CostModel, no_reduce_scatter: bool = False
) -> ReshardTable:
    """The table of a tensor type under a cost model; layers and stages alike share it."""
    return _table(tensor, _priced_alike(cost), no_reduce_scatter)


@lru_cache(maxsize=1024)
def _table(tensor: TensorType, cost: CostModel, no_reduce_scatter: bool) -> ReshardTable:
    return ReshardTable.build(
        tensor, cost.mesh.sizes, cost.primitive_time_s, no_reduce_scatter=no_reduce_scatter
    )


def clear_tables() -> None:
    """Forget all tables: tests that change how they are made need it."""
    _table.cache_clear()
    clear_graphs()


@lru_cache(maxsize=1024)
def _priced_alike(cost: CostModel) -> CostModel:
    """A cost model that prices moves the same: neither names nor the first rank matter to it."""
    names = tuple(f"axis_{i}" for i in range(cost.mesh.n_axes))
    return CostModel(replace(cost.mesh, names=names, first_rank=0), cost.dtype)


def _all_pairs(time: np.ndarray, tie: np.ndarray, next_hop: np.ndarray) -> None:
    """Floyd-Warshall in place, lexicographic by (time, tie) within 1e-9 relative."""
    finite = time[np.isfinite(time) & (time > 0)]
    unit = float(finite.min()) * 1e-10 if finite.size else 1e-30
    weight = time + unit * tie
    for k in range(len(time)):
        through = weight[:, k : k + 1] + weight[k : k + 1, :]
        better = through < weight - unit * 1e-6
        if better.any():
            weight[better] = through[better]
            time[better] = (time[:, k : k + 1] + time[k : k + 1, :])[better]
            tie[better] = (tie[:, k : k + 1] + tie[k : k + 1, :])[better]
            next_hop[better] = np.broadcast_to(next_hop[:, k : k + 1], better.shape)[better]
