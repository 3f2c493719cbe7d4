"""Every single move between the specs of a tensor: the graph in which reshards are paths.

Specs are the vertices; the edges are the moves of `moves.TABLE` on one axis, and the merged moves
over several axes at once (all_reduce, all_gather and reduce_scatter over the joint group). An outer
axis may not move while an inner one shards the same factor.

Which moves there are, and which share of the tensor each one sends, depends on a tensor's size only
through what divides its factors: with N ranks, tensors whose factors f have the same gcd(f, N) have
one graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.moves import Move, PrimitiveKind, Split
from autopar.spec import I, P, Placement, R, S, Spec, TensorType, all_specs, local_bytes, local_dims

# (primitive, local bytes by NCCL's accounting, axes) -> seconds
PrimitiveTime = Callable[[PrimitiveKind, int, tuple[int, ...]], float]

# Kinds of move that several axes may make together, as one collective over the joint group.
_MERGED = {
    ("P", "I"), ("P", "R"), ("I", "R"), ("P", "S"), ("S", "R"), ("S", "I"), ("I", "S"),
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
    for axes, target in _changes(tensor, spec, sizes):
        if _with(spec, axes, target) in legal:
            yield _step(tensor, spec, sizes, axes, target)


def _changes(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Placement]]:
    """The axes that may move together, and where to; the tensor may not divide so."""
    active = [a for a, n in enumerate(sizes) if n > 1]
    plain = (I, R, P) if tensor.has_grad else (R, P)
    targets = (*plain, *(S(*cell) for cell in tensor.cells))
    for axis, target in itertools.product(active, targets):
        source = spec.placements[axis]
        if source != target and (not source.is_shard or _is_innermost(spec, [axis])):
            yield (axis,), target
    for size in range(2, len(active) + 1):
        for axes in itertools.combinations(active, size):
            source = spec.placements[axes[0]]
            if any(spec.placements[a] != source for a in axes):
                continue
            if source.is_shard and not _is_innermost(spec, axes):
                continue
            for target in targets:
                if (source.kind, target.kind) in _MERGED:
                    yield axes, target


def _step(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...], axes: tuple[int, ...],
    target: Placement,
) -> Step:  # fmt: skip
    source = spec.placements[axes[0]]
    after = _with(spec, axes, target)
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
    return Step(move, after, forward, backward)


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
class Primitive:
    """One primitive over `axes`, on local bytes of the tensor's divided by `n_shards`."""

    kind: PrimitiveKind
    axes: tuple[int, ...]
    n_shards: int


@dataclass(frozen=True, eq=False)
class MoveGraph:
    """The moves of all tensors that the mesh divides alike.

    Move e goes from `specs[source[e]]` to `specs[target[e]]` over `axes[e]`; forward it runs
    `primitives[forward[e]]`, backward `primitives[backward[e]]`, the identity without gradient.
    """

    sizes: tuple[int, ...]
    specs: tuple[Spec, ...]
    index: Mapping[Spec, int]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    axes: tuple[tuple[int, ...], ...]
    primitives: tuple[Primitive, ...]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    at: Mapping[tuple[int, int], int]

    def step(self, tensor: TensorType, source: int, target: int) -> Step:
        """The move between two specs that one move joins, for one of the tensors."""
        axes = self.axes[self.at[source, target]]
        placement = self.specs[target].placements[axes[0]]
        return _step(tensor, self.specs[source], self.sizes, axes, placement)


def move_graph(tensor: TensorType, sizes: tuple[int, ...]) -> MoveGraph:
    """The graph of a tensor; those that are divided alike share it."""
    n_ranks = math.prod(sizes)
    dims = tuple(tuple(math.gcd(f, n_ranks) for f in factors) for factors in tensor.dims)
    return _graph(replace(tensor, dims=dims, itemsize=1), sizes)


@lru_cache(maxsize=1024)
def _graph(tensor: TensorType, sizes: tuple[int, ...]) -> MoveGraph:
    specs = all_specs(tensor, sizes)
    index, legal = {spec: i for i, spec in enumerate(specs)}, frozenset(specs)
    found = [(i, step) for i, s in enumerate(specs) for step in moves_from(tensor, s, sizes, legal)]
    primitives: dict[Primitive, int] = {}

    def number(kind: PrimitiveKind, axes: tuple[int, ...], size_bytes: int) -> int:
        n_shards = tensor.size_bytes // size_bytes if kind != "identity" else 1
        return primitives.setdefault(Primitive(kind, axes, n_shards), len(primitives))

    forward = [number(s.move.forward, s.move.axes, s.forward_bytes) for _, s in found]
    backward = [
        number(s.move.backward if tensor.has_grad else "identity", s.move.axes, s.backward_bytes)
        for _, s in found
    ]
    ends = [(i, index[step.target]) for i, step in found]
    at = {pair: e for e, pair in enumerate(ends)}
    assert len(at) == len(ends), "two specs are joined by one move at most"
    source, target = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    return MoveGraph(
        sizes, specs, index, source, target, tuple(step.move.axes for _, step in found),
        tuple(primitives), np.array(forward, dtype=np.int64), np.array(backward, dtype=np.int64),
        at,
    )  # fmt: skip


def clear_graphs() -> None:
    """Forget all graphs: tests that change which moves there are need it."""
    _graph.cache_clear()
