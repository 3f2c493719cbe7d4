"""Cross-mesh tensors: which slice goes from which rank of one stage to which rank of another.

A tensor leaves a stage with a *sent* spec and arrives at another with a *received* spec. The part
of a rank is a box in the space of factors. For a factor of n elements that axes cut, outermost
first, with sizes p and the rank at positions c, the box has the interval

    [o, o + n / prod(p)),    o = sum_i c_i * n / (p_1 ... p_i)          (`_box`)

On a folded axis, whose shards are in head-tail order (`placement/head_tail.py`), a part is two
boxes, one after the other, as which inner axes cut it. If both ends are folded alike, elements are
numbered in that order, and a part is one box.

A rank *owns* its part if it is at position 0 of every axis that does not cut the tensor. So the
parts of the owners tile the tensor. On an axis of more than one rank

    sent       S, or R: position 0 sends; its gradient P arrives there, zeros elsewhere
    received   S, or P: the value arrives at position 0, zeros elsewhere; its gradient R
               is sent back from there

The slices that cross are the intersections of a source owner's box with a target owner's box
(`slices`). Every element crosses once, and its gradient goes back once, by the same list with the
ends swapped. Gathers and broadcasts are moves inside one of the two meshes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import VerificationError
from autopar.mesh import LogicalMesh
from autopar.placement import (
    P,
    R,
    Spec,
    TensorType,
    illegal_reason,
    intervals_of,
    local_dims,
)

# One interval [start, stop) per factor.
_Box = tuple[tuple[int, int], ...]
# Where a box begins in the tensor that holds it, per factor.
_At = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """One rectangular piece of a tensor that goes from one rank to another.

    Ranks are those of the world. `source` and `target` index the local tensors of the two ranks,
    viewed by `local_factors`. `shape` is the piece's, one size per factor.
    """

    source_rank: int
    target_rank: int
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


def slices(
    dims: Sequence[Sequence[int]],
    source: Spec,
    source_mesh: LogicalMesh,
    target: Spec,
    target_mesh: LogicalMesh,
    folded: tuple[int | None, int | None] = (None, None),
) -> tuple[Slice, ...]:
    """The slices that take a tensor from `source` to `target`, by source rank, then target rank.

    `dims` are its global factor sizes per dim. A tensor without dims is one slice of shape (). A
    tensor without elements has no slices. `folded` are the folded axes of both ends.

    Raises `VerificationError` for specs that cannot be sent or received.
    """
    ends = (source, source_mesh, folded[0]), (target, target_mesh, folded[1])
    folds = [(spec.placements[a], mesh.sizes[a]) for spec, mesh, a in ends if a is not None]
    if len(folds) == 2 and folds[0] == folds[1]:
        folded = None, None
    return _slices(tuple(map(tuple, dims)), source, source_mesh, target, target_mesh, folded)


@lru_cache(maxsize=256)
def _slices(
    dims: tuple[tuple[int, ...], ...],
    source: Spec,
    source_mesh: LogicalMesh,
    target: Spec,
    target_mesh: LogicalMesh,
    folded: tuple[int | None, int | None],
) -> tuple[Slice, ...]:
    _check("sent", dims, source, source_mesh, (R.kind, "S"))
    _check("received", dims, target, target_mesh, (P.kind, "S"))
    if any(0 in factors for factors in dims):
        return ()
    ends = _owned(dims, target, target_mesh, folded[1])
    targets = {box: (rank, at) for rank, box, at in ends}
    sizes = {tuple(stop - start for start, stop in box) for box in targets}
    size = sizes.pop() if len(sizes) == 1 else None
    found = []
    for source_rank, box, source_at in _owned(dims, source, source_mesh, folded[0]):
        for target_rank, other, target_at in _overlapping(box, targets, size):
            common = tuple(
                (max(a, b), min(c, d)) for (a, c), (b, d) in zip(box, other, strict=True)
            )
            found.append(
                Slice(
                    source_rank,
                    target_rank,
                    _inner_slices(common, box, source_at),
                    _inner_slices(common, other, target_at),
                    tuple(stop - start for start, stop in common),
                )
            )
    return tuple(sorted(found, key=lambda piece: (piece.source_rank, piece.target_rank)))


def _overlapping(
    box: _Box, targets: Mapping[_Box, tuple[int, _At]], size: tuple[int, ...] | None
) -> list[tuple[int, _Box, _At]]:
    """The boxes of `targets` that intersect `box`, by rank. They tile the tensor, and have one
    `size`; None: they differ, as folded parts that an inner axis cuts unevenly."""
    if size is None:
        near = [
            other
            for other in targets
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True))
        ]
    else:
        intervals = [
            [(k * n, (k + 1) * n) for k in range(start // n, -(-stop // n))]
            for (start, stop), n in zip(box, size, strict=True)
        ]
        near = [*itertools.product(*intervals)]
    return sorted((rank, other, at) for other in near for rank, at in [targets[other]])


def local_factors(
    dims: Sequence[Sequence[int]], spec: Spec, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape that slices index: factor sizes of one rank's part, flattened over dims."""
    return tuple(n for factors in local_dims(_tensor(dims), spec, sizes) for n in factors)


def _tensor(dims: Sequence[Sequence[int]]) -> TensorType:
    """A type with these factors; item size and gradient do not matter here."""
    return TensorType(tuple(tuple(factors) for factors in dims), 1, True)


def _check(
    end: str,
    dims: Sequence[Sequence[int]],
    spec: Spec,
    mesh: LogicalMesh,
    kinds: Sequence[str],
) -> None:
    reason = illegal_reason(_tensor(dims), spec, mesh.sizes)
    for axis in mesh.active_axes if reason is None else ():
        if spec.placements[axis].kind not in kinds:
            reason = f"axis {mesh.names[axis]} is {spec.placements[axis]}, not {' or '.join(kinds)}"
    if reason is not None:
        raise VerificationError(
            f"a tensor cannot be {end} at {spec} on mesh {mesh.axes}: {reason}",
            hint="reshard it inside the stage first",
        )


def _owned(
    dims: Sequence[Sequence[int]], spec: Spec, mesh: LogicalMesh, folded: int | None
) -> Iterator[tuple[int, _Box, _At]]:
    """(rank, box, its place in the rank's tensor) of the ranks that own their parts, by rank."""
    whole = [axis for axis, p in enumerate(spec.placements) if not p.is_shard]
    for rank in mesh.ranks:
        coordinate = mesh.coordinate(rank)
        if not any(coordinate[axis] for axis in whole):
            for boxes in itertools.product(*_intervals(dims, spec, mesh.sizes, coordinate, folded)):
                yield rank, tuple(box for box, _ in boxes), tuple(at for _, at in boxes)


def _intervals(
    dims: Sequence[Sequence[int]], spec: Spec, sizes: Sequence[int], coordinate: Sequence[int],
    folded: int | None,
) -> Iterator[list[tuple[tuple[int, int], int]]]:  # fmt: skip
    """Per factor, what the rank at `coordinate` has of it: intervals, with their places there."""
    for dim, factors in enumerate(dims):
        for factor, n in enumerate(factors):
            parts = [(0, n)]
            for axis in spec.axes_of((dim, factor)):
                n_ranks, k = sizes[axis], coordinate[axis]
                if axis == folded:
                    parts = intervals_of(k, n_ranks, n, True)
                else:
                    parts = _sub_intervals(parts, *intervals_of(k, n_ranks, n, False)[0])
                n //= n_ranks
            ends = itertools.accumulate((stop - start for start, stop in parts), initial=0)
            yield list(zip(parts, ends, strict=False))


def _sub_intervals(
    parts: Sequence[tuple[int, int]], start: int, stop: int
) -> list[tuple[int, int]]:
    """The intervals of elements [start, stop) of `parts`, one after the other."""
    found, before = [], 0
    for a, b in parts:
        first, last = max(start, before), min(stop, before + b - a)
        if first < last:
            found.append((a + first - before, a + last - before))
        before += b - a
    return found


def _inner_slices(part: _Box, box: _Box, at: _At) -> tuple[slice, ...]:
    """`part` as an index into the tensor that holds `box` at these places."""
    return tuple(
        slice(start - base + place, stop - base + place)
        for (start, stop), (base, _), place in zip(part, box, at, strict=True)
    )
