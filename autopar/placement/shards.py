"""The definition of placements: what each rank holds of a tensor, and the tensor from its shards.

On one mesh axis of n ranks (`scatter`, and its inverse `gather`):

    R, I   the value on every rank
    S      its n pieces along one factor of one dim
    P      n random summands of it

Several axes are applied one after the other, outermost first. Ranks along R and I hold the same.
These functions use no groups and no collectives. Rules, moves and generated programs are checked
against them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from autopar.errors import VerificationError
from autopar.placement.spec import P, Placement, R, Spec, TensorType, local_shape


def gradient_placement(placement: Placement) -> Placement:
    """The gradient's placement: R and P swap, I and S stay."""
    return {R: P, P: R}.get(placement, placement)


@lru_cache(maxsize=1 << 12)
def gradient_spec(spec: Spec) -> Spec:
    """The spec of the gradient of a tensor with `spec`."""
    return Spec(tuple(gradient_placement(p) for p in spec.placements), spec.order)


def scatter(
    value: Tensor, tensor: TensorType, spec: Spec, sizes: Sequence[int], random: torch.Generator
) -> list[Tensor]:
    """What each rank holds of `value` under `spec`; ranks are row-major over axes of `sizes`."""
    order = _cutting_order(spec)
    dims = [list(factors) for factors in tensor.dims]
    parts: dict[tuple[int, ...], Tensor] = {(): value}
    for axis in order:
        placement, n = spec.placements[axis], sizes[axis]
        parts = {
            (*at, i): piece
            for at, part in parts.items()
            for i, piece in enumerate(_pieces(part, dims, placement, n, random))
        }
        if placement.is_shard:
            dims[placement.dim][placement.factor] //= n
    ranks = itertools.product(*map(range, sizes))
    return [parts[tuple(rank[axis] for axis in order)].clone() for rank in ranks]


def gather(
    locals_: Sequence[Tensor], tensor: TensorType, spec: Spec, sizes: Sequence[int]
) -> tuple[Tensor, float]:
    """The whole value, and the largest difference between ranks that should hold equal values.

    Raises `VerificationError` for a local shape that does not match `spec`.
    """
    shape = local_shape(tensor, spec, sizes)
    for x in locals_:
        if tuple(x.shape) != shape:
            raise VerificationError(f"a rank has shape {tuple(x.shape)}, {spec} means {shape}")
    order = _cutting_order(spec)
    ranks = itertools.product(*map(range, sizes))
    parts = {tuple(rank[axis] for axis in order): x for rank, x in zip(ranks, locals_, strict=True)}
    dims = [list(factors) for factors in tensor.dims]
    for axis, placement in enumerate(spec.placements):
        if placement.is_shard:
            dims[placement.dim][placement.factor] //= sizes[axis]
    spread = 0.0
    for axis in reversed(order):
        placement, n = spec.placements[axis], sizes[axis]
        outer = dict.fromkeys(at[:-1] for at in parts)
        pieces = {at: [parts[*at, i] for i in range(n)] for at in outer}
        if not placement.is_shard and placement != P:
            spread = max(spread, *(difference(p, ps[0]) for ps in pieces.values() for p in ps))
        parts = {at: _whole(ps, dims, placement) for at, ps in pieces.items()}
        if placement.is_shard:
            dims[placement.dim][placement.factor] *= n
    return parts[()], spread


def _cutting_order(spec: Spec) -> tuple[int, ...]:
    """The axes outermost first, but R and I last: ranks along those share the summands of P."""
    order = spec.order or range(len(spec.placements))
    copied = {a for a in order if not spec.placements[a].is_shard and spec.placements[a] != P}
    return (*(a for a in order if a not in copied), *(a for a in order if a in copied))


def _pieces(
    x: Tensor, dims: Sequence[Sequence[int]], placement: Placement, n: int, random: torch.Generator
) -> list[Tensor]:
    if placement.is_shard:
        factors = x.unflatten(placement.dim, tuple(dims[placement.dim]))
        pieces = factors.chunk(n, placement.dim + placement.factor)
        end = placement.dim + len(dims[placement.dim]) - 1
        return [piece.flatten(placement.dim, end) for piece in pieces]
    if placement != P:
        return [x] * n
    if x.dtype == torch.bool:  # a sum of bools is "or": one rank has the value
        return [x, *(torch.zeros_like(x) for _ in range(n - 1))]
    if x.is_floating_point() or x.is_complex():
        summands = [torch.randn(x.shape, generator=random, dtype=x.dtype) for _ in range(n - 1)]
    else:
        summands = [
            torch.randint(-5, 6, x.shape, generator=random, dtype=x.dtype) for _ in range(n - 1)
        ]
    return [x - sum(summands), *summands]


def _whole(pieces: Sequence[Tensor], dims: Sequence[Sequence[int]], placement: Placement) -> Tensor:
    if placement.is_shard:
        factors = tuple(dims[placement.dim])
        parts = [piece.unflatten(placement.dim, factors) for piece in pieces]
        end = placement.dim + len(factors) - 1
        return torch.cat(parts, placement.dim + placement.factor).flatten(placement.dim, end)
    if placement != P:
        return pieces[0]
    if pieces[0].dtype == torch.bool:
        return torch.stack(tuple(pieces)).any(0)
    return torch.stack(tuple(pieces)).sum(0)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of elements; infinite if shapes, dtypes or NaNs differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if torch.equal(actual, expected) or not actual.numel():
        return 0.0
    if not (actual.is_floating_point() or actual.is_complex()):
        return math.inf
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    gap = (actual - expected).abs().masked_fill(same, 0.0).max().item()
    return math.inf if math.isnan(gap) else gap
