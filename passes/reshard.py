"""Cheapest paths between specs: which moves turn one placement of a tensor into another.

Specs of one tensor are the vertices of a graph; its edges are the moves of `moves.TABLE` on
one axis, and the merged moves over several axes at once (all_reduce, all_gather and
reduce_scatter over the joint group). An outer axis may not move while an inner one shards
the same factor. Shortest paths between all pairs are found once per tensor type
(Floyd-Warshall); weights are forward plus backward time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.moves import COLLECTIVES, Move, PrimitiveKind, Split
from autopar.spec import I, P, Placement, R, S, Spec, TensorType, all_specs, local_bytes, local_dims

# (primitive, local bytes by NCCL's accounting, axes) -> seconds
PrimitiveTime = Callable[[PrimitiveKind, int, tuple[int, ...]], float]

# Kinds of move that several axes may make together, as one collective over the joint group.
_MERGED = {
    ("P", "I"): "p_to_i", ("P", "R"): "p_to_r", ("I", "R"): "i_to_r", ("P", "S"): "p_to_s",
    ("S", "R"): "s_to_r", ("S", "I"): "s_to_i", ("I", "S"): "i_to_s",
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One move of a reshard, with the local bytes of its forward and backward primitive."""

    move: Move
    target: Spec
    forward_bytes: int
    backward_bytes: int


def _split(tensor: TensorType, spec: Spec, sizes: Sequence[int], cell: tuple[int, int]) -> Split:
    dims = local_dims(tensor, spec, sizes)
    return Split(cell[0], math.prod(dims[cell[0]][: cell[1]]))


def _with(spec: Spec, axes: Sequence[int], placement: Placement) -> Spec:
    """`spec` with `axes` placed anew; where they shard, they become innermost."""
    placements = list(spec.placements)
    for axis in axes:
        placements[axis] = placement
    order = [a for a in (spec.order or range(len(placements))) if a not in axes] + list(axes)
    return Spec.of(placements, order)


def _is_innermost(spec: Spec, axes: Sequence[int]) -> bool:
    """Do `axes`, all on one factor, split it last and in this order?"""
    holders = spec.axes_of(spec.placements[axes[0]].cell)
    return holders[len(holders) - len(axes) :] == tuple(axes)


def moves_from(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...], legal: frozenset[Spec]
) -> Iterator[Step]:
    """Every single move out of `spec`."""
    active = [a for a, n in enumerate(sizes) if n > 1]
    plain = (I, R, P) if tensor.has_grad else (R, P)
    targets = (*plain, *(S(*cell) for cell in tensor.cells))
    for axis, target in itertools.product(active, targets):
        source = spec.placements[axis]
        if source != target and (not source.is_shard or _is_innermost(spec, [axis])):
            yield from _step(tensor, spec, sizes, (axis,), target, legal)
    for size in range(2, len(active) + 1):
        for axes in itertools.combinations(active, size):
            source = spec.placements[axes[0]]
            if any(spec.placements[a] != source for a in axes):
                continue
            if source.is_shard and not _is_innermost(spec, axes):
                continue
            for target in targets:
                if (source.kind, target.kind) in _MERGED:
                    yield from _step(tensor, spec, sizes, axes, target, legal)


def _step(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...], axes: tuple[int, ...],
    target: Placement, legal: frozenset[Spec],
) -> Iterator[Step]:  # fmt: skip
    source = spec.placements[axes[0]]
    after = _with(spec, axes, target)
    if after not in legal:
        return
    name = f"{source.kind}_to_{target.kind}".lower()
    splits: tuple[Split, ...] = ()
    if source.is_shard and target.is_shard:
        pieces = _with_both(tensor, spec, sizes, axes, target)
        splits = (Split(source.dim, pieces), _split(tensor, spec, sizes, target.cell))
    elif source.is_shard:
        splits = (_split(tensor, spec, sizes, source.cell),)
    elif target.is_shard:
        splits = (_split(tensor, spec, sizes, target.cell),)
    move = Move(name, axes, splits)
    before_bytes, after_bytes = (local_bytes(tensor, s, sizes) for s in (spec, after))
    forward = after_bytes if move.forward == "all_gather" else before_bytes
    backward = 0
    if tensor.has_grad:
        backward = before_bytes if move.backward == "all_gather" else after_bytes
    yield Step(move, after, forward, backward)


def _with_both(
    tensor: TensorType, spec: Spec, sizes: Sequence[int], axes: Sequence[int], target: Placement
) -> int:
    """`outer` of the source's cut, counted in a piece already cut along the target."""
    source = spec.placements[axes[0]]
    dims = [list(factors) for factors in local_dims(tensor, spec, sizes)]
    dims[target.dim][target.factor] //= math.prod(sizes[a] for a in axes)
    return math.prod(dims[source.dim][: source.factor])


def step_time_s(step: Step, has_grad: bool, time_of: PrimitiveTime) -> tuple[float, float]:
    """(forward, backward) seconds of one move."""
    forward = time_of(step.move.forward, step.forward_bytes, step.move.axes)
    backward = time_of(step.move.backward, step.backward_bytes, step.move.axes)
    return forward, backward if has_grad else 0.0


@dataclass(frozen=True)
class ReshardTable:
    """All-pairs cheapest reshards of one tensor type.

    `time_s[i, j]` is the least forward + backward time from `specs[i]` to `specs[j]`,
    `tie[i, j]` the collectives on that path (the tie-break).
    """

    tensor: TensorType
    specs: tuple[Spec, ...]
    index: dict[Spec, int]
    time_s: NDArray[np.float64]
    tie: NDArray[np.float64]
    next_hop: NDArray[np.int32]
    steps: dict[tuple[int, int], Step]

    @staticmethod
    def build(
        tensor: TensorType,
        sizes: tuple[int, ...],
        time_of: PrimitiveTime,
        no_reduce_scatter: bool = False,
    ) -> ReshardTable:
        """Search all paths; `no_reduce_scatter` leaves out moves that reduce_scatter."""
        specs = all_specs(tensor, sizes)
        index = {spec: i for i, spec in enumerate(specs)}
        legal = frozenset(specs)
        n = len(specs)
        time = np.full((n, n), np.inf)
        tie = np.zeros((n, n))
        steps: dict[tuple[int, int], Step] = {}
        next_hop = np.tile(np.arange(n, dtype=np.int32), (n, 1))
        np.fill_diagonal(time, 0.0)
        for i, spec in enumerate(specs):
            for step in moves_from(tensor, spec, sizes, legal):
                if no_reduce_scatter and _reduce_scatters(step, tensor.has_grad):
                    continue
                j = index[step.target]
                seconds = sum(step_time_s(step, tensor.has_grad, time_of))
                calls = int(step.move.forward in COLLECTIVES)
                calls += tensor.has_grad and step.move.backward in COLLECTIVES
                # A move that costs nothing still counts a little: no detours.
                weight = calls + 1e-3
                if (seconds, weight) < (time[i, j], tie[i, j] if (i, j) in steps else np.inf):
                    time[i, j], tie[i, j], steps[i, j] = seconds, weight, step
        _all_pairs(time, tie, next_hop)
        return ReshardTable(tensor, specs, index, time, tie, next_hop, steps)

    def path(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The moves of the cheapest reshard; empty when the specs are equal."""
        at, goal, out = self.index[source], self.index[target], []
        while at != goal:
            following = int(self.next_hop[at, goal])
            out.append(self.steps[at, following])
            at = following
        return tuple(out)

    def along_paths(self, step_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """For every pair of specs, the sum of `step_values[i, j]` over the moves of its path."""
        n = len(self.specs)
        goal = np.broadcast_to(np.arange(n), (n, n))
        at = np.ascontiguousarray(goal.T)
        total = np.zeros((n, n))
        while (moving := at != goal).any():
            following = self.next_hop[at, goal]
            total[moving] += step_values[at, following][moving]
            at = np.where(moving, following, at)
        return total


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


@lru_cache(maxsize=1024)
def _priced_alike(cost: CostModel) -> CostModel:
    """A cost model that prices moves the same: neither names nor the first rank matter to it."""
    names = tuple(f"axis_{i}" for i in range(cost.mesh.n_axes))
    return CostModel(replace(cost.mesh, names=names, first_rank=0), cost.dtype)


def _reduce_scatters(step: Step, has_grad: bool) -> bool:
    kinds = (step.move.forward, step.move.backward if has_grad else "identity")
    return "reduce_scatter" in kinds


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
