"""The items of a layer: kernels, collectives, and what is kept between forward and backward.

The program of a layer is a list of items in forward order; backward runs them in reverse. Recompute
runs the forward of the dropped items again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.laws import Kind

Group = Literal["tp", "ep", "cp", "expert_tp"]
# What recompute may drop: the attention core, cheap elementwise work, everything else.
Part = Literal["core", "elementwise", "matmul"]


@dataclass(frozen=True)
class Kernel:
    """One launch on a rank: its arithmetic and the memory it moves."""

    kind: Kind
    flops: float
    size_bytes: float
    n_launches: int = 1


@dataclass(frozen=True)
class Exchange:
    """One collective among the ranks of a group. `size_bytes` is NCCL's size."""

    kind: str
    group: Group
    size_bytes: float


@dataclass(frozen=True)
class Item:
    """A step of a layer.

    part          which kinds of recompute drop and repeat it
    kept_bytes    results that backward needs; recompute of this item drops them
    out_bytes     results that backward needs and later items read; only full recompute drops them
    weight_bytes  operands of a weight's gradient, kept longer if that is computed later
    """

    name: str
    part: Part
    forward: tuple[Kernel | Exchange, ...]
    backward: tuple[Kernel | Exchange, ...]
    kept_bytes: float = 0.0
    out_bytes: float = 0.0
    weight_bytes: float = 0.0


def matmul(
    name: str, m: float, n: float, k: float, width: int, *, has_bias: bool = False,
    is_kept: bool = True, n_times: int = 1, accumulated_bytes: float = 0.0,
) -> Item:  # fmt: skip
    """A matmul with a weight, m k, k n -> m n; backward has one more for each operand.

    n_times             number of equal matmuls side by side
    accumulated_bytes   bytes moved per weight element to add its gradient to earlier ones
    """
    flops, moved = n_times * 2.0 * m * n * k, n_times * width * (m * k + k * n + m * n)
    one = Kernel("matmul", flops, moved, n_times)
    backward = [one, one]
    if has_bias:  # its gradient is a sum over rows
        backward.append(Kernel("memory", 0.0, n_times * width * m * n))
    if accumulated_bytes:
        backward.append(Kernel("memory", 0.0, n_times * k * n * accumulated_bytes))
    kept_bytes = n_times * m * n * width if is_kept else 0.0
    weight_bytes = n_times * width * (m * k + m * n)
    return Item(name, "matmul", (one,), tuple(backward), kept_bytes, weight_bytes=weight_bytes)


def elementwise(
    name: str, forward_bytes: float, backward_bytes: float, kept_bytes: float = 0.0,
    n_forward: int = 1, n_backward: int = 1, out_bytes: float = 0.0,
) -> Item:  # fmt: skip
    """An item whose operators cost only the bytes that they touch."""
    return Item(
        name, "elementwise",
        (Kernel("memory", 0.0, forward_bytes, n_forward),),
        (Kernel("memory", 0.0, backward_bytes, n_backward),),
        kept_bytes, out_bytes,
    )  # fmt: skip


def exchange(
    name: str, forward: Sequence[tuple[str, float]], backward: Sequence[tuple[str, float]],
    group: Group = "tp",
) -> Item:  # fmt: skip
    """An item of collectives: (kind, size in bytes) of forward and of backward."""
    return Item(
        name, "matmul",
        tuple(Exchange(kind, group, size) for kind, size in forward),
        tuple(Exchange(kind, group, size) for kind, size in backward),
    )  # fmt: skip
