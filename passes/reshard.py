"""Cheapest paths between specs: which moves turn one placement of a tensor into another.

Shortest paths in the graph of single moves (`move_graph.py`), from the specs that are asked for
(Bellman and Ford's rounds; few moves make any path); weights are forward plus backward time. Meshes
that use the same axes share the graph, and so do tensors that differ in sizes alone; their paths
are found together (`ReshardTables`): arrays begin with an axis of cases, a tensor on a mesh each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.moves import COLLECTIVES
from autopar.passes.move_graph import MoveGraph, Step, clear_graphs, move_graph
from autopar.passes.primitive_costs import primitive_lines
from autopar.spec import Spec, TensorType

Array = NDArray[np.float64]
LastMoves = NDArray[np.signedinteger[Any]]


def primitive_calls(graph: MoveGraph) -> Array:
    """1 for a collective, else 0."""
    return np.array([float(p.kind in COLLECTIVES) for p in graph.primitives])


@dataclass(frozen=True, eq=False)
class Paths:
    """The cheapest paths from one spec: [cases, specs].

    `time_s` is the least forward + backward time to every spec, infinite where there is no path or
    either is not legal; `tie` the thousandths of the tie-break on that path, whole numbers, `last`
    its last move. There are many, so each is as small as it may be.
    """

    time_s: Array
    tie: NDArray[np.float32]
    last: LastMoves


@dataclass(frozen=True, eq=False)
class ReshardTables:
    """The cheapest reshards of tensors on meshes that use the same axes; paths are found when they
    are first asked for.

    `move_s` [cases, moves] are what moves take, infinite where they are not legal; `move_tie`
    [moves] their collectives, and a little for every move: no detours.
    """

    tensors: tuple[TensorType, ...]
    sizes: tuple[tuple[int, ...], ...]
    graph: MoveGraph
    legal: NDArray[np.bool_]
    move_s: Array
    move_tie: Array
    _paths: dict[int, Paths] = field(default_factory=dict, init=False)

    @property
    def index(self) -> Mapping[Spec, int]:
        return self.graph.index

    @property
    def size_bytes(self) -> Array:
        """[cases]"""
        return np.array([t.size_bytes for t in self.tensors], dtype=np.float64)

    @staticmethod
    def build(
        tensors: Sequence[TensorType],
        sizes: Sequence[tuple[int, ...]],
        seconds: Array,
        no_reduce_scatter: bool = False,
    ) -> ReshardTables:
        """Of the moves' prices; `seconds` are [cases, primitives of the graph],
        `no_reduce_scatter` leaves out moves that reduce_scatter."""
        graph = move_graph(tensors[0], sizes[0])
        forward, backward = graph.forward, graph.backward
        calls = primitive_calls(graph)
        move_s = seconds[:, forward] + seconds[:, backward]
        legal = np.stack([graph.legal(t, of) for t, of in zip(tensors, sizes, strict=True)])
        move_s[~(legal[:, graph.source] & legal[:, graph.target])] = np.inf
        if no_reduce_scatter:
            scatters = np.array([p.kind == "reduce_scatter" for p in graph.primitives], dtype=bool)
            move_s[:, scatters[forward] | scatters[backward]] = np.inf
        move_tie = calls[forward] + calls[backward] + 1e-3
        return ReshardTables(tuple(tensors), tuple(sizes), graph, legal, move_s, move_tie)

    def between(self, sources: Sequence[int], targets: Sequence[int]) -> tuple[Array, Array]:
        """(seconds, ties) from some specs to others: [cases, sources, targets]."""
        paths, at = self.paths(sources), np.asarray(targets, dtype=np.int64)
        return (
            np.stack([path.time_s[:, at] for path in paths], axis=1),
            np.stack([path.tie[:, at] for path in paths], axis=1).astype(np.float64) / 1e3,
        )

    def paths(self, sources: Sequence[int]) -> list[Paths]:
        """The paths from some specs, found together where they are not known."""
        unknown = [s for s in dict.fromkeys(sources) if s not in self._paths]
        if unknown:
            self._paths.update(zip(unknown, self._found(unknown), strict=True))
        return [self._paths[s] for s in sources]

    def _found(self, sources: Sequence[int]) -> Iterator[Paths]:
        last: LastMoves = _last_moves(self.graph, self.move_s, self.move_tie, sources, self.sizes)
        at = np.arange(len(sources))
        reached = last >= 0
        reached[:, at, sources] = self.legal[:, sources]
        values = np.stack(np.broadcast_arrays(self.move_s, self.move_tie), axis=1)
        totals = self._along(sources, last, values)
        time_s = np.where(reached, totals[:, 0], np.inf)
        tie = np.rint(totals[:, 1] * 1e3).astype(np.float32)
        if len(self.graph.source) < 2**15:
            last = last.astype(np.int16)
        for k in range(len(sources)):
            yield Paths(time_s[:, k], tie[:, k], last[:, k])

    def along_paths(self, sources: Sequence[int], move_values: Array) -> Array:
        """[cases, k, moves] -> [cases, k, sources, specs]: sums over the moves of the path to every
        spec."""
        last = np.stack([path.last for path in self.paths(sources)], axis=1)
        return self._along(sources, last, move_values)

    def _along(self, sources: Sequence[int], last: LastMoves, move_values: Array) -> Array:
        n_cases, _, n = last.shape
        values = np.moveaxis(move_values, 1, 2)
        total = np.zeros((n_cases, len(sources), n, values.shape[2]))
        # All paths at once, backwards, move by move.
        case, row, target = np.nonzero(last >= 0)
        at = target
        for _ in range(n):
            move = last[case, row, at]
            total[case, row, target] += values[case, move]
            at = self.graph.source[move]
            left = last[case, row, at] >= 0
            case, row, target, at = case[left], row[left], target[left], at[left]
        return np.moveaxis(total, 3, 1)

    def of(self, case: int) -> ReshardTable:
        """The table of one of the cases."""
        return ReshardTable(self, case)


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """All-pairs cheapest reshards of one tensor type on one mesh: a case of `tables`."""

    tables: ReshardTables
    case: int

    @property
    def tensor(self) -> TensorType:
        return self.tables.tensors[self.case]

    @property
    def index(self) -> Mapping[Spec, int]:
        return self.tables.index

    def seconds(self, source: Spec, targets: Iterable[Spec]) -> list[float]:
        """Of the cheapest reshards of one spec to others."""
        (path,) = self.tables.paths([self.index[source]])
        return [float(path.time_s[self.case, self.index[target]]) for target in targets]

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The legal ones."""
        legal = np.flatnonzero(self.tables.legal[self.case])
        return tuple(self.tables.graph.specs[i] for i in legal)

    def path(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The moves of the cheapest reshard; empty when the specs are equal."""
        tables, at, out = self.tables, self.index[target], []
        (paths,) = tables.paths([self.index[source]])
        while at != self.index[source]:
            before = int(tables.graph.source[paths.last[self.case, at]])
            out.append(tables.graph.step(self.tensor, tables.sizes[self.case], before, at))
            at = before
        return tuple(reversed(out))


def reshard_table(
    tensor: TensorType, cost: CostModel, no_reduce_scatter: bool = False
) -> ReshardTable:
    """The table of a tensor type under a cost model; layers and stages alike share it."""
    return _table(tensor, priced_alike(cost), no_reduce_scatter).of(0)


@lru_cache(maxsize=1024)
def _table(tensor: TensorType, cost: CostModel, no_reduce_scatter: bool) -> ReshardTables:
    return reshard_tables((tensor,), (cost,), no_reduce_scatter)


def reshard_tables(
    tensors: Sequence[TensorType], costs: Sequence[CostModel], no_reduce_scatter: bool = False
) -> ReshardTables:
    """The tables of tensors that differ in sizes, under cost models of meshes that use the same
    axes; one of each per case."""
    costs = tuple(priced_alike(cost) for cost in costs)
    sizes = [cost.mesh.sizes for cost in costs]
    lines = primitive_lines(move_graph(tensors[0], sizes[0]), costs)
    seconds = lines.seconds(np.array([t.size_bytes for t in tensors], dtype=np.float64))
    return ReshardTables.build(tensors, sizes, seconds, no_reduce_scatter)


def clear_tables() -> None:
    """Forget all tables: tests that change how they are made need it."""
    _table.cache_clear()
    clear_graphs()


@lru_cache(maxsize=1024)
def priced_alike(cost: CostModel) -> CostModel:
    """A cost model that prices moves the same: neither names nor the first rank matter to it."""
    names = tuple(f"axis_{i}" for i in range(cost.mesh.n_axes))
    return CostModel(replace(cost.mesh, names=names, first_rank=0), cost.dtype)


def _last_moves(
    graph: MoveGraph, move_s: Array, move_tie: Array, sources: Sequence[int],
    sizes: Sequence[tuple[int, ...]],
) -> NDArray[np.int64]:  # fmt: skip
    """[cases, sources, specs]: the last move of every cheapest path, by time, then tie; -1 at the
    source, and where there is none.

    The paths of a case are tried first in the next one of the same `sizes`: mostly, they stay.
    """
    usable = np.isfinite(move_s) & (move_s > 0)
    positive = np.where(usable, move_s, np.inf).min(axis=1, initial=np.inf)
    unit = np.where(np.isfinite(positive), positive * 1e-10, 1e-30)[:, None]
    # The move numbered -1 is none: it comes from nowhere, and weighs infinitely much.
    weights = np.pad(move_s + unit * move_tie, ((0, 0), (0, 1)), constant_values=np.inf)
    last = np.full((len(move_s), len(sources), len(graph.specs)), -1)
    tried: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for weight, of_case, axes in zip(weights, last, sizes, strict=True):
        if len(graph.source):
            _search(graph, weight, sources, tried.get(axes), of_case)
        tried[axes] = of_case
    return last


def _search(
    graph: MoveGraph, weight: Array, sources: Sequence[int], tried: NDArray[np.int64] | None,
    last: NDArray[np.int64],
) -> None:  # fmt: skip
    """Write the last moves of the cheapest paths: [sources, specs]; `tried` are those of paths to
    begin with."""
    order, starts, arrived_at = graph.by_target
    coming_from, into = np.append(graph.source, 0), graph.into
    before, arriving, rows = graph.source[order], weight[:-1][order], np.arange(len(sources))
    distance = np.full(last.shape, np.inf)
    distance[rows, sources] = 0.0
    if tried is not None:
        last[:] = tried
        known = -1
        while (n_reached := int(np.isfinite(distance).sum())) > known:
            known = n_reached
            along = distance[rows[:, None], coming_from[tried]] + weight[tried]
            np.copyto(distance, along, where=tried >= 0)
    while True:
        reached = np.minimum.reduceat(distance[:, before] + arriving, starts, axis=1)
        # Above what rounding may be: so no path comes back to where it was.
        row, column = np.nonzero(reached < distance[:, arrived_at] * (1 - 1e-15))
        if not len(row):
            break
        target = arrived_at[column]
        moves = into[target]
        best = (distance[row[:, None], coming_from[moves]] + weight[moves]).argmin(axis=1)
        last[row, target] = moves[np.arange(len(row)), best]
        distance[row, target] = reached[row, column]
    last[~np.isfinite(distance)] = -1
