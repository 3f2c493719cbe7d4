"""Placements and specs: where the values of one tensor live on a mesh.

A tensor has one placement on each mesh axis. The placement also fixes that of its gradient (the
R/I/V/P algebra of PyTorch's `spmd_types`, with S in place of V):

    R  Replicate   same value on every rank, different work ahead   gradient P
    I  Invariant   same value on every rank, same work ahead        gradient I
    S  Shard       split along one factor of one dim                gradient S
    P  Partial     the value is the sum over ranks                  gradient R

Every dim is a tuple of *factors*: sizes whose product is the dim, outermost first. So the heads of
a fused QKV projection can be sharded: they are one factor of its dim. `S(2)` is factor 0 of dim 2,
a contiguous shard; `S(2.1)` is factor 1.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.errors import OptionError


@dataclass(frozen=True, order=True)
class Placement:
    """One tensor's placement on one mesh axis: `R`, `I`, `P` or `S(dim)`."""

    kind: str
    dim: int = -1
    factor: int = 0

    def __hash__(self) -> int:
        # Hashes of numbers are equal in all processes (those of strings are not): specs cache their
        # hash and keep it when they are pickled.
        return hash((ord(self.kind), self.dim, self.factor))

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim}.{self.factor})" if self.factor else f"S({self.dim})"

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def cell(self) -> tuple[int, int]:
        """(dim, factor) of a Shard."""
        return self.dim, self.factor

    @staticmethod
    def parse(text: str) -> Placement:
        """The inverse of `str`; raises `OptionError` for anything else."""
        if text in ("R", "I", "P"):
            return Placement(text)
        match = re.fullmatch(r"S\(([0-9]{1,3})(?:\.([0-9]{1,3}))?\)", text)
        if match is None:
            raise OptionError(
                f"{text!r} is not a placement", hint="use R, I, P, S(dim) or S(dim.factor)"
            )
        return S(int(match[1]), int(match[2] or 0))


R, I, P = Placement("R"), Placement("I"), Placement("P")  # noqa: E741 (the field's names)


@lru_cache(maxsize=256)
def S(dim: int, factor: int = 0) -> Placement:
    """Shard `dim` along one of its factors. Cached, so that equal shards compare by identity."""
    return Placement("S", dim, factor)


# Breaks ties between equally good plans: I before S before R before P.
PREFERENCE = {"I": 0, "S": 1, "R": 2, "P": 3}


@dataclass(frozen=True)
class TensorType:
    """What planning knows of a tensor: factor sizes per dim, element size, gradient.

    A dim of size 1 has no factors. Sizes are global (over all ranks), of one microbatch.
    A parameter in mixed precision is stored, and its gradient reduced, with elements of other sizes
    than it is used with; 0 stands for the same size.
    """

    dims: tuple[tuple[int, ...], ...]
    itemsize: int
    has_grad: bool
    gradient_itemsize: int = 0
    stored_itemsize: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached: types are the keys of many tables."""
        sizes = (self.itemsize, self.gradient_itemsize, self.stored_itemsize)
        return hash((self.dims, self.has_grad, *sizes))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(factors) for factors in self.dims)

    @cached_property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def gradient_bytes(self, size_bytes: int) -> int:
        """Bytes of the gradient of so many bytes of the tensor."""
        return size_bytes // self.itemsize * (self.gradient_itemsize or self.itemsize)

    @property
    def cells(self) -> tuple[tuple[int, int], ...]:
        """Every (dim, factor)."""
        return tuple((d, k) for d, factors in enumerate(self.dims) for k in range(len(factors)))


@dataclass(frozen=True)
class Spec:
    """Placements of one tensor, one per mesh axis.

    `order` lists the axes outermost first. It matters only where several axes split the same
    factor, and is `()` for plain axis order.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Cached: specs are the keys of many tables."""
        return hash((self.placements, self.order))

    @staticmethod
    def of(placements: Sequence[Placement], order: Sequence[int] = ()) -> Spec:
        """A spec in canonical form: an `order` that changes nothing is dropped."""
        placements = tuple(placements)
        if not order:
            return Spec(placements)
        shared = _shared_cells(placements)
        if not shared:
            return Spec(placements)
        rank = {axis: i for i, axis in enumerate(order)}
        if all(sorted(axes, key=rank.__getitem__) == axes for axes in shared.values()):
            return Spec(placements)
        # Keeps the order of axes that share a factor; all other axes are in axis order.
        canonical = list(range(len(placements)))
        for axes in shared.values():
            for slot, axis in zip(axes, sorted(axes, key=rank.__getitem__), strict=True):
                canonical[slot] = axis
        return Spec(placements, tuple(canonical))

    @staticmethod
    def everywhere(placement: Placement, sizes: Sequence[int]) -> Spec:
        """`placement` on every mesh axis of more than one rank, I on the others."""
        return Spec(tuple(I if n == 1 else placement for n in sizes))

    def axes_of(self, cell: tuple[int, int]) -> tuple[int, ...]:
        """The axes that split `cell`, outermost first."""
        order = self.order or range(len(self.placements))
        return tuple(
            a for a in order if self.placements[a].is_shard and self.placements[a].cell == cell
        )

    def on(self, axes: Mapping[str, int]) -> str:
        """`S(0) on dp=2, S(1) on tp=4`, outermost first, for axes by name and size.

        `whole` if none of several ranks shards the tensor or leaves it partial.
        """
        placed = list(zip(self.placements, axes.items(), strict=True))
        texts = [
            f"{placement} on {axis}={size}"
            for placement, (axis, size) in (placed[i] for i in self.order or range(len(placed)))
            if size > 1 and placement.kind in "SP"
        ]
        return ", ".join(texts) or "whole"

    def __str__(self) -> str:
        text = " ".join(str(p) for p in self.placements)
        return f"{text} order {','.join(map(str, self.order))}" if self.order else text

    @staticmethod
    def parse(text: str) -> Spec:
        """The inverse of `str`; raises `OptionError` for anything else."""
        body, _, order = text.partition(" order ")
        placements = tuple(Placement.parse(word) for word in body.split())
        try:
            axes = tuple(int(a) for a in order.split(",")) if order else ()
        except ValueError:
            axes = (-1,)
        if order and sorted(axes) != list(range(len(placements))):
            raise OptionError(f"{text!r}: the order must list each axis once")
        return Spec.of(placements, axes)


def _shared_cells(placements: Sequence[Placement]) -> dict[tuple[int, int], list[int]]:
    """Cell -> the axes that split it, in axis order; only cells that several axes split."""
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard]
    if len(axes) < 2:
        return {}
    cells: dict[tuple[int, int], list[int]] = {}
    for axis in axes:
        cells.setdefault(placements[axis].cell, []).append(axis)
    return {cell: of for cell, of in cells.items() if len(of) > 1}


def local_dims(tensor: TensorType, spec: Spec, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Factor sizes of one rank's shard; `sizes` are those of the mesh axes."""
    dims = [list(factors) for factors in tensor.dims]
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard:
            dims[placement.dim][placement.factor] //= sizes[axis]
    return tuple(tuple(factors) for factors in dims)


def local_shape(tensor: TensorType, spec: Spec, sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(factors) for factors in local_dims(tensor, spec, sizes))


def local_bytes(tensor: TensorType, spec: Spec, sizes: Sequence[int]) -> int:
    n_shards = math.prod(sizes[axis] for axis, p in enumerate(spec.placements) if p.is_shard)
    return tensor.size_bytes // n_shards


def illegal_reason(tensor: TensorType, spec: Spec, sizes: Sequence[int]) -> str | None:
    """Why `tensor` cannot have `spec` on mesh axes of these sizes; None if it can."""
    if len(spec.placements) != len(sizes):
        return f"{len(spec.placements)} placements for {len(sizes)} mesh axes"
    for axis, placement in enumerate(spec.placements):
        if sizes[axis] == 1 and placement != I:
            return f"axis {axis} has one rank, where only I is meaningful, not {placement}"
        if placement.is_shard and placement.cell not in tensor.cells:
            return f"{placement} names no factor of a tensor with factors {tensor.dims}"
    for cell, n_shards in _shard_counts(spec.placements, sizes).items():
        size = tensor.dims[cell[0]][cell[1]]
        if size % n_shards:
            return f"{S(*cell)} has {size} elements, not divisible by {n_shards} ranks"
    return None


@lru_cache(maxsize=4096)
def all_specs(tensor: TensorType, sizes: tuple[int, ...]) -> tuple[Spec, ...]:
    """Every legal spec of `tensor`, orders included, in a fixed order.

    Without a gradient, R and I are the same: those specs use R.
    """
    plain = (I, R, P) if tensor.has_grad else (R, P)
    options = [(I,) if n == 1 else (*plain, *(S(*cell) for cell in tensor.cells)) for n in sizes]
    return tuple(
        spec
        for placements in itertools.product(*options)
        if divides(tensor, placements, sizes)
        for spec in every_order(placements)
    )


def divides(tensor: TensorType, placements: Sequence[Placement], sizes: Sequence[int]) -> bool:
    """Do the axis sizes divide every factor that they shard? `tensor` must have these factors."""
    counts = _shard_counts(placements, sizes)
    return not any(tensor.dims[dim][factor] % n for (dim, factor), n in counts.items())


def _shard_counts(
    placements: Sequence[Placement], sizes: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Sharded cell -> its number of shards."""
    counts: dict[tuple[int, int], int] = {}
    for placement, n_ranks in zip(placements, sizes, strict=True):
        if placement.is_shard:
            counts[placement.cell] = counts.get(placement.cell, 1) * n_ranks
    return counts


def every_order(placements: tuple[Placement, ...]) -> Iterator[Spec]:
    """The specs of `placements`: one for every distinct order of axes that share a factor."""
    seen: set[Spec] = set()
    if not _shared_cells(placements):
        yield Spec(placements)
        return
    for order in itertools.permutations(range(len(placements))):
        spec = Spec.of(placements, order)
        if spec not in seen:
            seen.add(spec)
            yield spec


def canonical_spec(tensor: TensorType, spec: Spec, sizes: Sequence[int]) -> Spec:
    """`spec` as `all_specs` writes it: with R in place of I for a tensor without gradient."""
    return spec if tensor.has_grad else without_gradient(spec, sizes)


def without_gradient(spec: Spec, sizes: Sequence[int]) -> Spec:
    """`spec` for a tensor without gradient: R in place of I on axes of more than one rank."""
    return Spec.of(
        [R if p == I and n > 1 else p for p, n in zip(spec.placements, sizes, strict=True)],
        spec.order,
    )
