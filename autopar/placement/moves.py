"""The reshard table: every one-axis change of placement and what it does both ways.

A *move* changes the placement of one tensor on one mesh axis (or on several merged ones),
and is named after the placements: `p_to_s` takes Partial to Shard. Its forward and its
backward are each one *primitive*; the cost model prices primitives, the runtime executes
them, the generated program names the move. The table is design section 2's; the
R/I/V/P algebra is that of PyTorch's `spmd_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrimitiveKind = Literal[
    "identity",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "slice",
    "zero_pad",
    "keep_first",
]
COLLECTIVES: frozenset[str] = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
)

# name -> (forward primitive, backward primitive)
TABLE: dict[str, tuple[PrimitiveKind, PrimitiveKind]] = {
    "i_to_r": ("identity", "all_reduce"),
    "p_to_i": ("all_reduce", "identity"),
    "p_to_r": ("all_reduce", "all_reduce"),
    "p_to_s": ("reduce_scatter", "all_gather"),
    "s_to_r": ("all_gather", "reduce_scatter"),
    "s_to_i": ("all_gather", "slice"),
    "i_to_s": ("slice", "all_gather"),
    "r_to_s": ("slice", "zero_pad"),
    "s_to_p": ("zero_pad", "slice"),
    "s_to_s": ("all_to_all", "all_to_all"),
    "r_to_p": ("keep_first", "keep_first"),
    "i_to_p": ("keep_first", "identity"),
    "r_to_i": ("identity", "keep_first"),
}


@dataclass(frozen=True)
class Split:
    """Where a dim is cut: seen as (outer, rest), it is cut along `rest`.

    `outer` is the product of the local sizes of the factors before the one that is sharded,
    so a contiguous shard has `outer == 1` and a strided one (heads of a fused QKV) more.
    """

    dim: int
    outer: int = 1


@dataclass(frozen=True)
class Move:
    """One change of placement over the group of `axes`.

    `splits` is empty, one split (moves to or from S), or (source, target) for `s_to_s`:
    there the target's `outer` counts in the tensor before the move, the source's `outer`
    in the pieces after it was cut along the target.
    """

    name: str
    axes: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    @property
    def forward(self) -> PrimitiveKind:
        return TABLE[self.name][0]

    @property
    def backward(self) -> PrimitiveKind:
        return TABLE[self.name][1]
