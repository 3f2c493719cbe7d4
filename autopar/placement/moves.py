"""The reshard table: every one-axis change of placement, with its forward and its backward.

A *move* changes the placement of one tensor on one mesh axis, or on several merged axes. Its name
says from what to what: `p_to_s` takes Partial to Shard. Forward and backward are each one
*primitive*. The cost model prices primitives, the runtime executes them, and the generated program
calls moves by name. The R/I/V/P algebra is that of PyTorch's `spmd_types`.
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
    "send_recv",
    "slice",
    "zero_pad",
    "keep_first",
]
COLLECTIVES: frozenset[str] = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
)
# Also messages round a ring, which are no part of a move.
COMMUNICATION = COLLECTIVES | {"send_recv"}

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

_NAMES = {pair: name for name, pair in TABLE.items()}
_TRANSPOSED = {name: _NAMES[pair[::-1]] for name, pair in TABLE.items()}


@dataclass(frozen=True)
class Split:
    """Where a dim is cut: viewed as (outer, rest), it is cut along `rest`.

    `outer` is the product of the local sizes of the factors before the sharded one. It is 1 for a
    contiguous shard, and more for a strided one (heads of a fused QKV).

    `folds` is 1 for pieces in order. For n, `rest` is taken as 2n pieces in head-tail order, 0,
    2n - 1, 1, 2n - 2, ..., before it is cut: rank r of n has pieces r and 2n - 1 - r.
    """

    dim: int
    outer: int = 1
    folds: int = 1


@dataclass(frozen=True)
class Move:
    """One change of placement over the group of `axes`.

    `splits` is empty, one split (moves to or from S), or (source, target) for `s_to_s`. In that
    case the target's `outer` refers to the tensor before the move, and the source's `outer` to the
    pieces of that tensor after it was cut along the target.
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

    @property
    def transposed(self) -> Move:
        """The move whose forward is this one's backward, and the other way round."""
        return Move(_TRANSPOSED[self.name], self.axes, self.splits[::-1])
