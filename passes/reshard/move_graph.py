"""Every single move between the specs of a tensor: the graph in which reshards are paths.

Specs are the vertices; the edges are the moves of `moves.TABLE` on one axis, and the merged moves
over several axes at once (all_reduce, all_gather and reduce_scatter over the joint group). An outer
axis may not move while an inner one shards the same factor.

Which moves there are depends on how many factors each dim has, and on which axes have several
ranks; which specs are legal, on what divides the factors; and which share of a tensor a move sends,
on the ranks of the axes that shard it. So all tensors with as many factors have one graph, for
meshes of all sizes: it is drawn for factors that everything divides (`_everything_divides`), and a
mesh and a tensor say which specs they leave out (`MoveGraph.legal`). Nor does it matter in which
dims the factors are: a graph is drawn for one factor in each dim, and its specs are renamed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.placement import (
    COLLECTIVES,
    TABLE,
    I,
    Move,
    P,
    Placement,
    PrimitiveKind,
    R,
    S,
    Spec,
    Split,
    TensorType,
    all_specs,
    local_bytes,
    local_dims,
)

# (primitive, local bytes by NCCL's accounting, axes) -> seconds
PrimitiveTime = Callable[[PrimitiveKind, int, tuple[int, ...]], float]

# Kinds of move that several axes may make together, as one collective over the joint group.
_MERGED = {
    ("P", "I"), ("P", "R"), ("I", "R"), ("P", "S"), ("S", "R"), ("S", "I"), ("I", "S"),
}  # fmt: skip


@dataclass(frozen=True)
class MoveStep:
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
) -> Iterator[MoveStep]:
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
    for axis in active:
        source = spec.placements[axis]
        if not source.is_shard or _is_innermost(spec, [axis]):
            for target in targets:
                if source != target:
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
) -> MoveStep:  # fmt: skip
    source = spec.placements[axes[0]]
    after = _with(spec, axes, target)
    splits: tuple[Split, ...] = ()
    if source.is_shard and target.is_shard:
        pieces = _with_both(tensor, spec, sizes, axes, target)
        splits = (Split(source.dim, pieces), _split(tensor, spec, sizes, target.cell))
    elif source.is_shard:
        splits = (_split(tensor, spec, sizes, source.cell),)
    elif target.is_shard:
        splits = (_split(tensor, spec, sizes, target.cell),)
    move = Move(_name(source, target), axes, splits)
    before_bytes, after_bytes = (local_bytes(tensor, s, sizes) for s in (spec, after))
    forward = after_bytes if move.forward == "all_gather" else before_bytes
    backward = 0
    if tensor.has_grad:
        backward = before_bytes if move.backward == "all_gather" else after_bytes
    return MoveStep(move, after, forward, backward)


def _name(source: Placement, target: Placement) -> str:
    """Of the move between them."""
    return f"{source.kind}_to_{target.kind}".lower()


def _with_both(
    tensor: TensorType, spec: Spec, sizes: Sequence[int], axes: Sequence[int], target: Placement
) -> int:
    """`outer` of the source's cut, counted in a piece already cut along the target."""
    source = spec.placements[axes[0]]
    dims = [list(factors) for factors in local_dims(tensor, spec, sizes)]
    dims[target.dim][target.factor] //= math.prod(sizes[a] for a in axes)
    return math.prod(dims[source.dim][: source.factor])


def step_time_s(step: MoveStep, has_grad: bool, time_of: PrimitiveTime) -> tuple[float, float]:
    """(forward, backward) seconds of one move."""
    forward = time_of(step.move.forward, step.forward_bytes, step.move.axes)
    backward = time_of(step.move.backward, step.backward_bytes, step.move.axes)
    return forward, backward if has_grad else 0.0


@dataclass(frozen=True)
class Primitive:
    """One primitive over `axes`, on local bytes of a tensor that `shards` cut."""

    kind: PrimitiveKind
    axes: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MoveGraph:
    """The moves of all tensors with as many factors in each dim, on meshes with the same axes in
    use.

    Move e goes from `specs[source[e]]` to `specs[target[e]]` over `axes[e]`; forward it runs
    `primitives[forward[e]]`, backward `primitives[backward[e]]`, the identity without gradient.
    `splits` are the distinct (factor, axes that share it) of the specs, of which `has_split[i]`
    marks those of spec i. All but the specs, and the factors of the splits, is that of the `drawn`
    graph, None for one that is.
    """

    specs: tuple[Spec, ...]
    index: Mapping[Spec, int]
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    axes: tuple[tuple[int, ...], ...]
    primitives: tuple[Primitive, ...]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    at: Mapping[tuple[int, int], int]
    splits: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    has_split: NDArray[np.bool_]
    drawn: MoveGraph | None = None

    @cached_property
    def calls(self) -> NDArray[np.float64]:
        """[primitives]: 1 for a collective, else 0."""
        return np.array([float(p.kind in COLLECTIVES) for p in self.primitives])

    @cached_property
    def ties(self) -> NDArray[np.float64]:
        """[moves]: their collectives, and a little for every move: no detours."""
        found: NDArray[np.float64] = self.calls[self.forward] + self.calls[self.backward] + 1e-3
        return found

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """[specs + 1]: where the moves out of every spec begin; they are in the order of their
        sources."""
        return np.searchsorted(self.source, np.arange(len(self.specs) + 1))

    def legal(
        self, tensors: Sequence[TensorType], sizes: Sequence[Sequence[int]]
    ) -> NDArray[np.bool_]:
        """[cases, specs]: which specs tensors may have, each on axes of its sizes."""
        n_ranks = np.array(sizes, dtype=np.int64)
        uneven = np.zeros((len(tensors), len(self.splits)), dtype=bool)
        for split, ((dim, factor), axes) in enumerate(self.splits):
            cut = np.array([tensor.dims[dim][factor] for tensor in tensors])
            uneven[:, split] = cut % n_ranks[:, axes].prod(axis=1) > 0
        out: NDArray[np.bool_] = ~(uneven @ self.has_split.T)
        return out

    def step(
        self, tensor: TensorType, sizes: tuple[int, ...], source: int, target: int
    ) -> MoveStep:
        """The move between two specs that one move joins, for one of the tensors."""
        axes = self.axes[self.at[source, target]]
        placement = self.specs[target].placements[axes[0]]
        return _step(tensor, self.specs[source], sizes, axes, placement)


def move_graph(tensor: TensorType, sizes: tuple[int, ...]) -> MoveGraph:
    """The graph of a tensor; those with as many factors share it."""
    n_factors = tuple(len(factors) for factors in tensor.dims)
    return _graph(n_factors, tensor.has_grad, tuple(n > 1 for n in sizes))


def _everything_divides(
    n_dims: int, has_grad: bool, in_use: tuple[bool, ...]
) -> tuple[TensorType, tuple[int, ...]]:
    """A tensor that all axes together divide everywhere, and their sizes."""
    sizes = tuple(2 if used else 1 for used in in_use)
    return TensorType(((math.prod(sizes),),) * n_dims, 1, has_grad), sizes


@lru_cache(maxsize=1024)
def _graph(n_factors: tuple[int, ...], has_grad: bool, in_use: tuple[bool, ...]) -> MoveGraph:
    cells = [(dim, k) for dim, n in enumerate(n_factors) for k in range(n)]
    drawn = _drawn(len(cells), has_grad, in_use)
    names = {S(number): S(*cell) for number, cell in enumerate(cells)}
    specs = tuple(
        Spec(tuple([names.get(p, p) for p in s.placements]), s.order) for s in drawn.specs
    )
    splits = tuple((cells[number], axes) for (number, _), axes in drawn.splits)
    index = {spec: i for i, spec in enumerate(specs)}
    return replace(drawn, specs=specs, index=index, splits=splits, drawn=drawn)


@lru_cache(maxsize=256)
def _drawn(n_cells: int, has_grad: bool, in_use: tuple[bool, ...]) -> MoveGraph:
    """The graph of tensors with one factor in each dim."""
    tensor, sizes = _everything_divides(n_cells, has_grad, in_use)
    specs = all_specs(tensor, sizes)
    index = {spec: i for i, spec in enumerate(specs)}
    shards = [tuple(a for a, p in enumerate(s.placements) if p.is_shard) for s in specs]
    # Primitives are numbered by their fields: there are far fewer than moves.
    primitives: dict[tuple[PrimitiveKind, tuple[int, ...], tuple[int, ...]], int] = {}

    def number(kind: PrimitiveKind, axes: tuple[int, ...], after: int, before: int) -> int:
        """Of a primitive that takes one spec to another: what it gathers counts when whole."""
        cut = shards[after if kind == "all_gather" else before] if kind != "identity" else ()
        return primitives.setdefault((kind, axes, cut), len(primitives))

    plain = {spec.placements: i for spec, i in index.items() if not spec.order}

    def moved_to(spec: Spec, axes: tuple[int, ...], placement: Placement) -> int:
        """The place of `_with`, which is slow; only shards that share a factor have an order."""
        after = list(spec.placements)
        for axis in axes:
            after[axis] = placement
        if spec.order or (placement.is_shard and after.count(placement) > len(axes)):
            return index[_with(spec, axes, placement)]
        return plain[tuple(after)]

    ends, moved, run = [], [], []
    for i, spec in enumerate(specs):
        for axes, placement in _changes(tensor, spec, sizes):
            j = moved_to(spec, axes, placement)
            forward, backward = TABLE[_name(spec.placements[axes[0]], placement)]
            backward = backward if has_grad else "identity"
            ends.append((i, j))
            moved.append(axes)
            run.append((number(forward, axes, j, i), number(backward, axes, i, j)))
    at = {pair: e for e, pair in enumerate(ends)}
    assert len(at) == len(ends), "two specs are joined by one move at most"
    source, target = np.array(ends, dtype=np.int64).reshape(-1, 2).T.copy()
    run_forward, run_backward = np.array(run, dtype=np.int64).reshape(-1, 2).T.copy()
    cells = [dict.fromkeys(p.cell for p in spec.placements if p.is_shard) for spec in specs]
    of_specs = [
        [(c, tuple(sorted(s.axes_of(c)))) for c in of] for s, of in zip(specs, cells, strict=True)
    ]
    splits = tuple(dict.fromkeys(split for of in of_specs for split in of))
    has_split = np.array([[split in of for split in splits] for of in of_specs], dtype=bool)
    return MoveGraph(
        specs, index, source, target, tuple(moved), tuple(Primitive(*key) for key in primitives),
        run_forward, run_backward, at, splits, has_split.reshape(len(specs), len(splits)),
    )  # fmt: skip


def clear_graphs() -> None:
    """Forget all graphs: tests that change which moves there are need it."""
    _graph.cache_clear()
    _drawn.cache_clear()
