"""Cheapest paths between specs: which moves turn one placement of a tensor into another.

Shortest paths in the graph of single moves (`move_graph.py`) between all pairs of specs, once per
tensor type (Floyd-Warshall); weights are forward plus backward time. Meshes that use the same axes
share the graph, and their tables are made together (`ReshardTables`): arrays begin with an axis of
meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.moves import COLLECTIVES
from autopar.passes.move_graph import MoveGraph, Step, clear_graphs, move_graph
from autopar.passes.primitive_costs import primitive_lines
from autopar.spec import Spec, TensorType

Array = NDArray[np.float64]
Indices = tuple[NDArray[np.int64], ...]


def primitive_calls(graph: MoveGraph) -> Array:
    """1 for a collective, else 0."""
    return np.array([float(p.kind in COLLECTIVES) for p in graph.primitives])


@dataclass(frozen=True, eq=False)
class ReshardTables:
    """All-pairs cheapest reshards of one tensor type on several meshes that use the same axes.

    `time_s[b, i, j]` is the least forward + backward time from `specs[i]` to `specs[j]` on mesh b,
    `tie[b, i, j]` the collectives on that path (the tie-break), `next_hop[b, i, j]` where it goes
    first. What is not legal on a mesh is infinitely far.
    """

    tensor: TensorType
    sizes: tuple[tuple[int, ...], ...]
    graph: MoveGraph
    legal: NDArray[np.bool_]
    time_s: Array
    tie: Array
    next_hop: NDArray[np.int32]

    @property
    def index(self) -> Mapping[Spec, int]:
        return self.graph.index

    @staticmethod
    def build(
        tensor: TensorType,
        sizes: Sequence[tuple[int, ...]],
        seconds: Array,
        no_reduce_scatter: bool = False,
    ) -> ReshardTables:
        """Search all paths; `seconds` are [meshes, primitives of the graph], `no_reduce_scatter`
        leaves out moves that reduce_scatter."""
        graph = move_graph(tensor, sizes[0])
        n, n_meshes = len(graph.specs), len(sizes)
        kept = np.ones(len(graph.source), dtype=bool)
        if no_reduce_scatter:
            scatters = np.array([p.kind == "reduce_scatter" for p in graph.primitives], dtype=bool)
            kept = ~(scatters[graph.forward] | scatters[graph.backward])
        source, target = graph.source[kept], graph.target[kept]
        forward, backward = graph.forward[kept], graph.backward[kept]
        calls = primitive_calls(graph)
        # What a mesh does not have is infinitely far; what costs nothing still counts a little:
        # no detours.
        move_s, move_tie = np.full((n_meshes, n, n), np.inf), np.zeros((1, n, n))
        move_s[:, source, target] = seconds[:, forward] + seconds[:, backward]
        move_tie[:, source, target] = calls[forward] + calls[backward] + 1e-3
        legal = np.stack([graph.legal(tensor, of_mesh) for of_mesh in sizes])
        move_s[~(legal[:, :, None] & legal[:, None, :])] = np.inf
        next_hop, reached = _next_hops(move_s, move_tie, np.flatnonzero(legal.any(axis=0)))
        time_s, tie = np.where(reached, 0.0, np.inf), np.zeros((n_meshes, n, n))
        tables = ReshardTables(tensor, tuple(sizes), graph, legal, time_s, tie, next_hop)
        for pairs, (b, at, to) in tables._walk():
            time_s[pairs] += move_s[b, at, to]
            tie[pairs] += move_tie[0, at, to]
        return tables

    def along_paths(self, move_values: Array) -> Array:
        """[meshes, k, moves] -> [meshes, k, specs, specs]: sums over the moves of the path of
        every pair."""
        n_meshes, n = len(self.sizes), len(self.graph.specs)
        values = np.zeros((n_meshes, n, n, move_values.shape[1]))
        values[:, self.graph.source, self.graph.target] = np.moveaxis(move_values, 1, 2)
        total = np.zeros_like(values)
        for pairs, move in self._walk():
            total[pairs] += values[move]
        return np.moveaxis(total, 3, 1)

    def _walk(self) -> Iterator[tuple[Indices, Indices]]:
        """All paths at once, move by move: (mesh, source, target) of those that go on, and their
        next moves as (mesh, from, to)."""
        n = len(self.graph.specs)
        pairs: Indices = np.nonzero(np.isfinite(self.time_s) & ~np.eye(n, dtype=bool))
        at = pairs[1]
        while len(at):
            to = self.next_hop[pairs[0], at, pairs[2]].astype(np.int64)
            yield pairs, (pairs[0], at, to)
            left = to != pairs[2]
            pairs, at = tuple(index[left] for index in pairs), to[left]

    def of(self, mesh: int) -> ReshardTable:
        """The table of one of the meshes."""
        return ReshardTable(self, mesh)


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """All-pairs cheapest reshards of one tensor type on one mesh of `tables`."""

    tables: ReshardTables
    mesh: int

    @property
    def tensor(self) -> TensorType:
        return self.tables.tensor

    @property
    def index(self) -> Mapping[Spec, int]:
        return self.tables.index

    @property
    def time_s(self) -> Array:
        """[specs, specs]"""
        return self.tables.time_s[self.mesh]

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The legal ones."""
        legal = np.flatnonzero(self.tables.legal[self.mesh])
        return tuple(self.tables.graph.specs[i] for i in legal)

    def path(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The moves of the cheapest reshard; empty when the specs are equal."""
        tables, at, goal, out = self.tables, self.index[source], self.index[target], []
        while at != goal:
            following = int(tables.next_hop[self.mesh, at, goal])
            out.append(tables.graph.step(self.tensor, tables.sizes[self.mesh], at, following))
            at = following
        return tuple(out)


def reshard_table(
    tensor: TensorType, cost: CostModel, no_reduce_scatter: bool = False
) -> ReshardTable:
    """The table of a tensor type under a cost model; layers and stages alike share it."""
    return reshard_tables(tensor, (cost,), no_reduce_scatter).of(0)


def reshard_tables(
    tensor: TensorType, costs: Sequence[CostModel], no_reduce_scatter: bool = False
) -> ReshardTables:
    """The tables of a tensor type under cost models of meshes that use the same axes."""
    return _tables(tensor, tuple(priced_alike(cost) for cost in costs), no_reduce_scatter)


@lru_cache(maxsize=1024)
def _tables(
    tensor: TensorType, costs: tuple[CostModel, ...], no_reduce_scatter: bool
) -> ReshardTables:
    sizes = [cost.mesh.sizes for cost in costs]
    lines = primitive_lines(move_graph(tensor, sizes[0]), costs)
    return ReshardTables.build(tensor, sizes, lines.seconds(tensor.size_bytes), no_reduce_scatter)


def clear_tables() -> None:
    """Forget all tables: tests that change how they are made need it."""
    _tables.cache_clear()
    clear_graphs()


@lru_cache(maxsize=1024)
def priced_alike(cost: CostModel) -> CostModel:
    """A cost model that prices moves the same: neither names nor the first rank matter to it."""
    names = tuple(f"axis_{i}" for i in range(cost.mesh.n_axes))
    return CostModel(replace(cost.mesh, names=names, first_rank=0), cost.dtype)


def _next_hops(
    move_s: Array, move_tie: Array, over: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Floyd-Warshall over the specs `over`, lexicographic by (time, tie) within 1e-9 relative.

    Returns where the shortest path of every pair goes first, and of which pairs there is one.
    """
    n = move_s.shape[-1]
    positive = np.where(np.isfinite(move_s) & (move_s > 0), move_s, np.inf).min(axis=(1, 2))
    unit = np.where(np.isfinite(positive), positive * 1e-10, 1e-30)[:, None, None]
    weight = move_s + unit * move_tie
    weight[:, np.arange(n), np.arange(n)] = 0.0
    next_hop = np.tile(np.arange(n, dtype=np.int32), (len(weight), n, 1))
    for k in over:
        through = weight[:, :, k : k + 1] + weight[:, k : k + 1, :]
        better = through < weight - unit * 1e-6
        np.copyto(weight, through, where=better)
        np.copyto(next_hop, next_hop[:, :, k : k + 1], where=better)
    return next_hop, np.isfinite(weight)
