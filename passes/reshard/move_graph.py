"""All single moves between the specs of a tensor: the graph in which reshards are paths.

Vertices are specs. Edges are the moves of `TABLE` (`autopar/placement/moves.py`) on one axis, and
merged moves over several axes at once: all_reduce, all_gather and reduce_scatter over the joint
group. An outer axis may not move while an inner one shards the same factor.

All tensors with the same number of factors per dim share one graph, on meshes of all sizes:

    the moves       depend on the number of factors, and on which axes have several ranks
    legal specs     depend on what divides the factors (`MoveGraph.legal`)
    bytes of moves  depend on the ranks of the axes that shard the tensor (`Primitive.shards`)

So the graph is drawn for factors that everything divides (`_everything_divides`), with one factor
in each dim. Its specs are then renamed to the dims and factors of the tensor (`_graph`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
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

# (primitive, local bytes as NCCL counts them, axes) -> seconds
PrimitiveTime = Callable[[PrimitiveKind, int, tuple[int, ...]], float]

# Moves that several axes may make together, as one collective over the joint group.
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


def _place(spec: Spec, axes: Sequence[int], placement: Placement) -> Spec:
    """`spec` with `placement` on `axes`; if they shard, they become the innermost axes."""
    placements = list(spec.placements)
    for axis in axes:
        placements[axis] = placement
    order = [a for a in (spec.order or range(len(placements))) if a not in axes] + list(axes)
    return Spec.of(placements, order)


def _is_innermost(spec: Spec, axes: Sequence[int]) -> bool:
    """Are `axes`, all on one factor, its innermost axes in this order?"""
    holders = spec.axes_of(spec.placements[axes[0]].cell)
    return holders[len(holders) - len(axes) :] == tuple(axes)


def moves_from(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...], legal: frozenset[Spec]
) -> Iterator[MoveStep]:
    """Every single move out of `spec`."""
    for axes, target in _changes(tensor, spec, sizes):
        if _place(spec, axes, target) in legal:
            yield _step(tensor, spec, sizes, axes, target)


def _changes(
    tensor: TensorType, spec: Spec, sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Placement]]:
    """Axes that may move together, and their new placement; it need not divide the tensor."""
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
    after = _place(spec, axes, target)
    splits: tuple[Split, ...] = ()
    if source.is_shard and target.is_shard:
        pieces = _outer_size(tensor, spec, sizes, axes, target)
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
        backward = tensor.gradient_bytes(backward)
    return MoveStep(move, after, forward, backward)


def _name(source: Placement, target: Placement) -> str:
    """The name of the move in `TABLE`."""
    return f"{source.kind}_to_{target.kind}".lower()


def _outer_size(
    tensor: TensorType, spec: Spec, sizes: Sequence[int], axes: Sequence[int], target: Placement
) -> int:
    """`outer` of the source's split, counted in a piece that is already cut along the target."""
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
    """One primitive over `axes`, on the local bytes of a tensor that axes `shards` cut."""

    kind: PrimitiveKind
    axes: tuple[int, ...]
    shards: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MoveGraph:
    """The moves of all tensors with equally many factors per dim, on meshes with equal axes in use.

    Move e goes from `specs[source[e]]` to `specs[target[e]]` over `axes[e]`. Forward it runs
    `primitives[forward[e]]`, backward `primitives[backward[e]]`; that is the identity for tensors
    without gradient. `at` maps (source, target) -> move. `splits` are the distinct (factor, axes
    that share it) of all specs; `has_split` [specs, splits] marks those of each spec. A renamed
    graph shares all but `specs`, `index` and the factors of `splits` with its `drawn` graph, which
    is None for a drawn one.
    """

    specs: tuple[Spec, ...]
    index: Mapping[Spec, int]
    source: Indices
    target: Indices
    axes: tuple[tuple[int, ...], ...]
    primitives: tuple[Primitive, ...]
    forward: Indices
    backward: Indices
    at: Mapping[tuple[int, int], int]
    splits: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    has_split: BoolArray
    drawn: MoveGraph | None = None

    @cached_property
    def calls(self) -> Array:
        """[primitives]: 1 for a collective, else 0."""
        return np.array([float(p.kind in COLLECTIVES) for p in self.primitives])

    @cached_property
    def ties(self) -> Array:
        """[moves]: the number of collectives, and a little for every move, to avoid detours."""
        found: Array = self.calls[self.forward] + self.calls[self.backward] + 1e-3
        return found

    @cached_property
    def first(self) -> Indices:
        """[specs + 1]: first[v] up to first[v + 1] are the moves out of spec v."""
        return np.searchsorted(self.source, np.arange(len(self.specs) + 1))

    def legal(self, tensors: Sequence[TensorType], sizes: Sequence[Sequence[int]]) -> BoolArray:
        """[cases, specs]: is the spec legal for the case's tensor on axes of the case's sizes?"""
        n_ranks = np.array(sizes, dtype=np.int64)
        uneven = np.zeros((len(tensors), len(self.splits)), dtype=bool)
        for split, ((dim, factor), axes) in enumerate(self.splits):
            cut = np.array([tensor.dims[dim][factor] for tensor in tensors])
            uneven[:, split] = cut % n_ranks[:, axes].prod(axis=1) > 0
        out: BoolArray = ~(uneven @ self.has_split.T)
        return out

    def step(
        self, tensor: TensorType, sizes: tuple[int, ...], source: int, target: int
    ) -> MoveStep:
        """The single move between two specs, for one of the tensors."""
        axes = self.axes[self.at[source, target]]
        placement = self.specs[target].placements[axes[0]]
        return _step(tensor, self.specs[source], sizes, axes, placement)


def move_graph(tensor: TensorType, sizes: tuple[int, ...]) -> MoveGraph:
    """The graph of a tensor; all tensors with equally many factors per dim share it."""
    n_factors = tuple(len(factors) for factors in tensor.dims)
    return _graph(n_factors, tensor.has_grad, tuple(n > 1 for n in sizes))


def _everything_divides(
    n_dims: int, has_grad: bool, in_use: tuple[bool, ...]
) -> tuple[TensorType, tuple[int, ...]]:
    """A tensor whose every factor is divided by all axes together, and the axis sizes."""
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
        """The number of a primitive; all_gather counts the bytes of its result."""
        cut = shards[after if kind == "all_gather" else before] if kind != "identity" else ()
        return primitives.setdefault((kind, axes, cut), len(primitives))

    plain = {spec.placements: i for spec, i in index.items() if not spec.order}

    def target_of(spec: Spec, axes: tuple[int, ...], placement: Placement) -> int:
        """The index of `_place(spec, axes, placement)`, without its cost in most cases."""
        after = list(spec.placements)
        for axis in axes:
            after[axis] = placement
        if spec.order or (placement.is_shard and after.count(placement) > len(axes)):
            return index[_place(spec, axes, placement)]
        return plain[tuple(after)]

    ends, moved, run = [], [], []
    for i, spec in enumerate(specs):
        for axes, placement in _changes(tensor, spec, sizes):
            j = target_of(spec, axes, placement)
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
