"""The moves: one function per row of `TABLE` (`autopar/placement/moves.py`).

A move m changes a tensor's placement with primitive F_m, and its gradient's with G_m, where
`TABLE[m] = (F_m, G_m)`. Generated programs call m in forward, and the row (G_m, F_m) in backward:
every row has its transpose in the table. So a move itself needs no gradient.

Results are contiguous. If the primitive is the identity and the input is contiguous, the result
shares its memory; otherwise it is a new tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import VerificationError
from autopar.placement import COLLECTIVES, TABLE, PrimitiveKind, Split
from autopar.runtime.collectives.fused import start_fused
from autopar.runtime.groups import Group, Pending


def apply_primitive(kind: PrimitiveKind, x: Tensor, g: Group, splits: Sequence[Split]) -> Tensor:
    """Execute one primitive by name.

    `splits` holds one split, or (source, target) for all_to_all. identity, all_reduce and
    keep_first ignore it.
    """
    match kind:
        case "identity":
            return x
        case "all_reduce":
            return g.all_reduce(x)
        case "all_gather":
            return g.all_gather(x, splits[0])
        case "reduce_scatter":
            return g.reduce_scatter(x, splits[0])
        case "all_to_all":
            return g.all_to_all(x, splits[0], splits[1])
        case "slice":
            return g.slice(x, splits[0])
        case "zero_pad":
            return g.zero_pad(x, splits[0])
        case "keep_first":
            return g.keep_first(x)
    raise VerificationError(f"there is no primitive {kind!r}")


@dataclass(frozen=True)
class MoveFunction:
    """The row `name` of the table as a function of a tensor and a group.

    `dim`, `outer` and `folds` are the split of a move to or from Shard; `source` and `target` are
    the two splits of `s_to_s`, as (dim, outer) or (dim, outer, folds).
    """

    name: str

    def __call__(
        self, x: Tensor, g: Group, dim: int | None = None, outer: int = 1, folds: int = 1,
        source: tuple[int, ...] | None = None, target: tuple[int, ...] | None = None,
    ) -> Tensor:  # fmt: skip
        splits = _splits(dim, outer, folds, source, target)
        return apply_primitive(TABLE[self.name][0], x, g, splits).contiguous()

    def start(
        self, x: Tensor, g: Group, dim: int | None = None, outer: int = 1, folds: int = 1,
        source: tuple[int, ...] | None = None, target: tuple[int, ...] | None = None,
    ) -> Pending[Tensor]:  # fmt: skip
        """Begin the move. `x` must not be written before the wait."""
        kind, splits = TABLE[self.name][0], _splits(dim, outer, folds, source, target)
        if kind in COLLECTIVES:
            return g.start(kind, x, splits)
        return Pending(apply_primitive(kind, x, g, splits).contiguous())

    def together(
        self, xs: list[Tensor], g: Group, dims: Sequence[int], outers: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The move of many tensors of one dtype, as one collective; empties the list.

        `dims` and `outers` (1 by default) are the splits of the tensors.
        """
        return self.start_together(xs, g, dims, outers).wait()

    def start_together(
        self, xs: list[Tensor], g: Group, dims: Sequence[int], outers: Sequence[int] | None = None
    ) -> Pending[list[Tensor]]:
        """Begin `together`. The tensors may be written before the wait if there are several."""
        pairs = zip(dims, outers or [1] * len(dims), strict=True)
        return start_fused(TABLE[self.name][0], g, xs, [(Split(*pair),) for pair in pairs])


def _splits(
    dim: int | None, outer: int, folds: int,
    source: tuple[int, ...] | None, target: tuple[int, ...] | None,
) -> tuple[Split, ...]:  # fmt: skip
    if source is not None and target is not None:
        return Split(*source), Split(*target)
    return () if dim is None else (Split(dim, outer, folds),)


# Forward primitive | backward primitive.
i_to_r = MoveFunction("i_to_r")  # identity | all_reduce (Megatron's f; DDP)
p_to_i = MoveFunction("p_to_i")  # all_reduce | identity (Megatron's g)
p_to_r = MoveFunction("p_to_r")  # all_reduce | all_reduce
p_to_s = MoveFunction("p_to_s")  # reduce_scatter | all_gather
s_to_r = MoveFunction("s_to_r")  # all_gather | reduce_scatter (FSDP, ZeRO-3)
s_to_i = MoveFunction("s_to_i")  # all_gather | slice
i_to_s = MoveFunction("i_to_s")  # slice | all_gather
r_to_s = MoveFunction("r_to_s")  # slice | zero_pad
s_to_p = MoveFunction("s_to_p")  # zero_pad | slice
s_to_s = MoveFunction("s_to_s")  # all_to_all | all_to_all
r_to_p = MoveFunction("r_to_p")  # keep_first (zeros on all but the first rank) | keep_first
i_to_p = MoveFunction("i_to_p")  # keep_first | identity
r_to_i = MoveFunction("r_to_i")  # identity | keep_first
