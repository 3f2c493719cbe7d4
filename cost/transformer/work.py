"""The items of a layer: kernels, collectives, and what is kept between forward and backward.

The program of a layer is a list of items in forward order; backward runs them in reverse. Recompute
runs the forward of the dropped items again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.laws import Kind
from autopar.cost.transformer.recipe import Group

# What recompute may drop: the attention core, cheap elementwise work, everything else of a layer;
# never what is before the first layer and after the last one.
Part = Literal["core", "elementwise", "matmul", "end"]


@dataclass(frozen=True)
class Kernel:
    """One launch on a rank: its arithmetic, in float8 or not, and the memory it moves."""

    kind: Kind
    flops: float
    size_bytes: float
    n_launches: int = 1
    in_float8: bool = False


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
    out_bytes     results that backward needs and later items read; recompute of layers drops them
    weight_bytes  operands of a weight's gradient, kept longer if that is computed later
    n_parameters  on a rank, before ZeRO; all ranks of the group `copies` hold them
    is_last       the layer's backward reads nothing that it or a later item makes
    """

    name: str
    part: Part
    forward: tuple[Kernel | Exchange, ...]
    backward: tuple[Kernel | Exchange, ...]
    kept_bytes: float = 0.0
    out_bytes: float = 0.0
    weight_bytes: float = 0.0
    n_parameters: float = 0.0
    copies: Group = "dp"
    is_last: bool = False


def elementwise(
    name: str, forward_bytes: float, backward_bytes: float, kept_bytes: float = 0.0,
    n_forward: int = 1, n_backward: int = 1, out_bytes: float = 0.0, part: Part = "elementwise",
    n_parameters: float = 0.0,
) -> Item:  # fmt: skip
    """An item whose operators cost only the bytes that they touch."""
    forward = Kernel("memory", 0.0, forward_bytes, n_forward)
    backward = Kernel("memory", 0.0, backward_bytes, n_backward)
    return Item(
        name, part, (forward,), (backward,), kept_bytes, out_bytes, n_parameters=n_parameters
    )


def exchange(
    name: str, size_bytes: float, forward: Sequence[str], backward: Sequence[str],
    group: Group = "tp", *, copies: bool = False,
) -> Item:  # fmt: skip
    """An item of collectives of one size: their kinds, forward and backward.

    copies: each has a kernel that copies what is gathered or scattered
    """
    copy = (Kernel("memory", 0.0, 2 * size_bytes),) if copies else ()
    there, back = (
        tuple(step for kind in kinds for step in (Exchange(kind, group, size_bytes), *copy))
        for kinds in (forward, backward)
    )
    return Item(name, "matmul", there, back)
