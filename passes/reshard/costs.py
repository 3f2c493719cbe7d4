"""The cheapest reshards: which moves turn one spec of a tensor into another, and their seconds.

A reshard is a shortest path in the graph of single moves (`move_graph.py`, `paths.py`). The weight
of a move is its forward plus backward time. Meshes with the same axes in use share the graph, and
so do tensors that differ only in sizes. Their paths are found together (`ReshardTables`): arrays
start with an axis of *cases*, one tensor on one mesh each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.cost.laws import CostModel
from autopar.passes.reshard.move_graph import MoveGraph, MoveStep, move_graph
from autopar.passes.reshard.paths import (
    LastMoves,
    Ties,
    find_paths,
    last_along,
    move_weights,
    path_seconds,
    sum_along,
)
from autopar.passes.reshard.primitive_costs import primitive_lines
from autopar.placement import Spec, TensorType


@dataclass(eq=False)
class ReshardTables:
    """The cheapest reshards of tensors on meshes with the same axes in use, found on demand.

    `legal` is [cases, specs]. `seconds` is [cases, 2 x primitives of the graph]: of each primitive
    on the tensor, then on its gradient, which may be of another dtype; infinite for a primitive
    that may not be used. `backward` is the place there of each move's backward. To save memory,
    only the last moves of the paths are kept: `_last` is [cases, sources, specs], and `_row` maps
    source -> its place there. `_known` is what was computed `once`.
    """

    tensors: tuple[TensorType, ...]
    sizes: tuple[tuple[int, ...], ...]
    graph: MoveGraph
    legal: BoolArray
    seconds: Array
    backward: Indices = field(init=False)
    _last: LastMoves = field(init=False)
    _row: dict[int, int] = field(default_factory=dict, init=False)
    _known: dict[Hashable, Array] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.backward = self.graph.backward + len(self.graph.primitives)

    @property
    def index(self) -> Mapping[Spec, int]:
        return self.graph.index

    @property
    def size_bytes(self) -> Array:
        """[cases]"""
        return np.array([t.size_bytes for t in self.tensors], dtype=np.float64)

    @property
    def forward_s(self) -> Array:
        """[cases, moves]: seconds of forward; 0 for a move that may not be used."""
        seconds = self.seconds[:, self.graph.forward]
        return np.where(np.isfinite(seconds), seconds, 0.0)

    @property
    def gradient_bytes(self) -> Array:
        """[cases]"""
        return np.array([t.gradient_bytes(t.size_bytes) for t in self.tensors], dtype=np.float64)

    @staticmethod
    def build(
        tensors: Sequence[TensorType],
        sizes: Sequence[tuple[int, ...]],
        seconds: Array,
        no_reduce_scatter: bool = False,
        gradient_s: Array | None = None,
    ) -> ReshardTables:
        """The tables for primitives that take `seconds` [cases, primitives of the graph].

        `gradient_s`: the same for gradients; None if they take as long.

        `no_reduce_scatter` leaves out the moves that reduce_scatter.
        """
        graph = move_graph(tensors[0], sizes[0])
        both = np.concatenate((seconds, seconds if gradient_s is None else gradient_s), axis=1)
        if no_reduce_scatter:
            scatters = np.array([p.kind == "reduce_scatter" for p in graph.primitives], dtype=bool)
            both = np.where(np.tile(scatters, 2), np.inf, both)
        legal = graph.legal(tensors, sizes)
        return ReshardTables(tuple(tensors), tuple(sizes), graph, legal, both)

    def between(self, sources: Sequence[int], targets: Sequence[int]) -> tuple[Array, Ties]:
        """(seconds, ties) between specs: [cases, sources, targets].

        Seconds are forward + backward; infinite if there is no path or a spec is not legal. Ties
        are rounded to thousandths, and 0 where seconds are infinite.
        """
        graph, rows = self.graph, self._rows_of(sources)
        time_s, tie = path_seconds(
            graph.source, self._last, rows, np.array(targets, dtype=np.int64),
            graph.forward, self.backward, self.seconds, graph.ties,
        )  # fmt: skip
        time_s[~self.legal[:, sources]] = np.inf
        return time_s, tie

    def path_sums(
        self, sources: Sequence[int], targets: Sequence[int], move_values: Array
    ) -> Array:
        """Sums over the moves of each path: [cases, k, moves] -> [cases, k, sources, targets]."""
        rows, at = self._rows_of(sources), np.array(targets, dtype=np.int64)
        values = np.ascontiguousarray(move_values)  # the loops are compiled once per layout
        return sum_along(self.graph.source, self._last, rows, at, values)

    def last_path_values(
        self, sources: Sequence[int], targets: Sequence[int], move_values: Array
    ) -> Array:
        """Of the last move of each path whose value is not 0: [cases, moves] -> [cases, sources,
        targets]."""
        rows, at = self._rows_of(sources), np.array(targets, dtype=np.int64)
        values = np.ascontiguousarray(move_values)
        return last_along(self.graph.source, self._last, rows, at, values)

    def once(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """What was computed from these tables for `key`: several problems ask for the same."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def last_moves(self, source: int, case: int) -> LastMoves:
        """[specs]: the last moves of the paths from `source`, which minimise time, then tie."""
        (row,) = self._rows_of([source])
        found: LastMoves = self._last[case, row]
        return found

    def _rows_of(self, sources: Sequence[int]) -> Indices:
        """The rows of `sources` in `_last`; paths from new sources are found together."""
        unknown = [s for s in dict.fromkeys(sources) if s not in self._row]
        if unknown:
            graph = self.graph
            weights = move_weights(
                graph.source, graph.target, graph.forward, self.backward,
                self.legal, self.seconds, graph.ties,
            )  # fmt: skip
            found = find_paths(graph.first, graph.target, weights, np.array(unknown))
            if len(graph.target) < 2**15:  # int16 halves the memory
                found = found.astype(np.int16)
            self._last = np.concatenate((self._last, found), axis=1) if self._row else found
            self._row |= {s: len(self._row) + i for i, s in enumerate(unknown)}
        return np.array([self._row[s] for s in sources], dtype=np.int64)

    def of(self, case: int) -> ReshardTable:
        """The table of one case."""
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

    def path(self, source: Spec, target: Spec) -> tuple[MoveStep, ...]:
        """The moves of the cheapest reshard; empty when the specs are equal."""
        tables, at, out = self.tables, self.index[target], []
        last = tables.last_moves(self.index[source], self.case)
        while at != self.index[source]:
            before = int(tables.graph.source[last[at]])
            out.append(tables.graph.step(self.tensor, tables.sizes[self.case], before, at))
            at = before
        return tuple(reversed(out))


def reshard_table(
    tensor: TensorType, cost: CostModel, no_reduce_scatter: bool = False
) -> ReshardTable:
    """The table of a tensor type under a cost model; equal layers and stages share it."""
    return _table(tensor, canonical_cost(cost), no_reduce_scatter).of(0)


@lru_cache(maxsize=1024)
def _table(tensor: TensorType, cost: CostModel, no_reduce_scatter: bool) -> ReshardTables:
    return reshard_tables((tensor,), (cost,), np.zeros(1, dtype=np.int64), no_reduce_scatter)


def reshard_tables(
    tensors: Sequence[TensorType],
    costs: tuple[CostModel, ...],
    cost_of: Indices,
    no_reduce_scatter: bool = False,
) -> ReshardTables:
    """The tables of tensors that differ only in sizes, one case each.

    Case i has tensor i under the cost model `costs[cost_of[i]]`. All meshes use the same axes.
    """
    sizes = [costs[i].mesh.sizes for i in cost_of]
    lines = primitive_lines(move_graph(tensors[0], sizes[0]), costs).of(cost_of)
    seconds = lines.seconds(np.array([t.size_bytes for t in tensors], dtype=np.float64))
    gradient_s = None
    if any(t.gradient_itemsize for t in tensors):
        gradients = [float(t.gradient_bytes(t.size_bytes)) for t in tensors]
        gradient_s = lines.seconds(np.array(gradients))
    return ReshardTables.build(tensors, sizes, seconds, no_reduce_scatter, gradient_s)


@lru_cache(maxsize=1024)
def canonical_cost(cost: CostModel) -> CostModel:
    """A cost model with the same prices: names and the first rank do not matter."""
    names = tuple(f"axis_{i}" for i in range(cost.mesh.n_axes))
    mesh = replace(cost.mesh, names=names, first_rank=0)
    return CostModel(
        mesh, cost.dtype, hides=cost.hides, kernels=cost.kernels, hides_tp=cost.hides_tp
    )
