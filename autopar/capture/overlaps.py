"""Which tensors of one storage have elements in common, from offsets, shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def overlaps_itself(tensor: Tensor) -> bool:
    """May two elements be one, as in an expanded tensor or in windows?"""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False


def share_elements(a: Tensor, b: Tensor) -> bool:
    """Is an element of `a` also one of `b`? Exact; both lie in one storage."""
    if not a.numel() or not b.numel():
        return False
    # offset_a + sum(i * stride_a) = offset_b + sum(j * stride_b), for indices within the shapes
    reaches: dict[int, tuple[int, int]] = {}
    for tensor, sign in ((a, 1), (b, -1)):
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
            low, high = reaches.get(stride, (0, 0))
            end = sign * (size - 1)
            reaches[stride] = low + min(end, 0), high + max(end, 0)
    reaches.pop(0, None)
    terms = [(s, *reaches[s]) for s in sorted(reaches, reverse=True)]
    return _reaches(int(b.storage_offset()) - int(a.storage_offset()), terms)


def _reaches(distance: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    """Is `distance` the sum of k * stride, each k in [low, high]? The strides fall."""
    if not terms:
        return distance == 0
    (stride, low, high), *smaller = terms
    least = sum(s * first for s, first, _ in smaller)
    most = sum(s * last for s, _, last in smaller)
    # least <= distance - k * stride <= most
    first, last = -((most - distance) // stride), (distance - least) // stride
    return any(
        _reaches(distance - k * stride, smaller)
        for k in range(max(first, low), min(last, high) + 1)
    )


def are_one_view(written: Tensor, read: Tensor) -> bool:
    """Is each element of `written` beside itself in `read`, broadcast to its shape?"""
    if written.storage_offset() != read.storage_offset():
        return False
    if read.dim() > written.dim():
        return False
    strides = [0] * (written.dim() - read.dim()) + [
        stride if size > 1 else 0 for stride, size in zip(read.stride(), read.shape, strict=True)
    ]
    return all(
        ours == theirs
        for ours, theirs, size in zip(written.stride(), strides, written.shape, strict=True)
        if size > 1
    )
