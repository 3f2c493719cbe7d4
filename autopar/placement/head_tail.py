"""Head-tail order: shards of a sequence under which causal attention is equal work for all ranks.

With contiguous shards the last rank sees all keys, and the first only its own. So a sequence is cut
into 2n pieces, and rank r of n has pieces r and 2n - 1 - r: as much from the head as from the tail
(J. Zhu: zigzag ring attention, github.com/zhuzilin/ring-flash-attention, 2024; torch's
`_HeadTailLoadBalancer`). Rows r of the head see r pieces of keys and half of their own, those of
the tail 2n - 1 - r and half: 2n for every rank.

To every operator but causal attention a shard is any part of the rows, as long as all tensors agree
on it. So only moves, deliveries and messages know the order (`Split.folds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.placement.spec import Spec


def head_tail_order(n_ranks: int) -> list[int]:
    """The pieces of rank 0, of rank 1, ...: 0, 2n - 1, 1, 2n - 2, ..."""
    return [piece for r in range(n_ranks) for piece in (r, 2 * n_ranks - 1 - r)]


def intervals_of(rank: int, n_ranks: int, size: int, is_folded: bool) -> list[tuple[int, int]]:
    """The [start, stop) of a rank's shard of `size` elements: one, or its head and its tail."""
    n_pieces = 2 * n_ranks if is_folded else n_ranks
    pieces = (rank, n_pieces - 1 - rank) if is_folded else (rank,)
    n = size // n_pieces
    return [(piece * n, (piece + 1) * n) for piece in pieces]


def folds_of(dims: Sequence[Sequence[int]], spec: Spec, axis: int, sizes: Sequence[int]) -> int:
    """`Split.folds` of the shard on an axis whose sequences are in head-tail order.

    1 if another axis cuts the factor further out: then the axis has a part of a part, in order; and
    if the factor has no 2n equal pieces.
    """
    placement, n = spec.placements[axis], sizes[axis]
    if not placement.is_shard or spec.axes_of(placement.cell)[0] != axis:
        return 1
    dim, factor = placement.cell
    return 1 if dims[dim][factor] % (2 * n) else n
