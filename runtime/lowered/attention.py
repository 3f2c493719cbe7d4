"""Causal attention over a query whose sequence is sharded on a group.

Rank r of n holds rows [r·s, (r+1)·s) of the query, and all keys and values. Torch's `is_causal`
aligns the first row with the first key: row i sees keys [0, i]. So on rank r

    row i sees keys j ≤ r·s + i

No row of rank r sees a key from (r+1)·s on. Those keys are cut off, which is exact and saves
their share of the matmuls. What is left is causal again, with the last row aligned with the last
key: torch's `causal_lower_right`, for which GPUs have flash kernels. Nothing is communicated. Each
rank's gradient of the keys and values is its part of the sum over ranks, as a Replicate's gradient
is, so autograd needs no help.

In head-tail order (`autopar/placement/head_tail.py`) a rank's rows are two such parts, r and
2n − 1 − r of 2n. Together they see as many keys on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from autopar.runtime.groups import Group
from autopar.runtime.lowered.tape import taped


def _attention(
    query_local: Tensor, key: Tensor, value: Tensor, g: Group, scale: float | None, grouped: bool,
    folded: bool = False,
) -> Tensor:  # fmt: skip
    """Rows of `aten.scaled_dot_product_attention(is_causal=True)`: * c e, * t e, * t f -> * c f.

    `grouped` is its `enable_gqa`; `folded` says that the rows are in head-tail order.
    """
    if not folded:
        return _part(query_local, g.rank, key, value, scale, grouped)
    parts = zip(query_local.chunk(2, -2), (g.rank, 2 * g.size - 1 - g.rank), strict=True)
    return _join_rows([_part(q, number, key, value, scale, grouped) for q, number in parts])


def _part(
    query: Tensor, number: int, key: Tensor, value: Tensor, scale: float | None, grouped: bool
) -> Tensor:
    """A part of the rows, of which `number` equal parts are before it."""
    n_rows, n_keys = query.shape[-2], key.shape[-2]
    first_row = number * n_rows
    n_seen = min(first_row + n_rows, n_keys)
    if n_seen < n_keys:
        key, value = key.narrow(-2, 0, n_seen), value.narrow(-2, 0, n_seen)
    mask: Tensor = causal_lower_right(n_rows, n_seen)
    if n_seen < first_row + n_rows:  # fewer keys than rows: the last rows see all of them
        rows = torch.arange(first_row, first_row + n_rows, device=key.device)
        mask = rows.unsqueeze(1) >= torch.arange(n_seen, device=key.device)
    out: Tensor = F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=grouped
    )
    return out


def _join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Parts of the rows, one after the other; strides are in the same order as those of a part."""
    order = sorted(range(parts[0].dim()), key=parts[0].stride, reverse=True)
    rows = torch.cat([part.permute(order) for part in parts], order.index(parts[0].dim() - 2))
    return rows.permute(sorted(range(len(order)), key=order.__getitem__))


def _like(
    query_local: Tensor, key: Tensor, value: Tensor, g: Group, scale: float | None, grouped: bool,
    folded: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the same kernel, but of no rank in particular."""
    out: Tensor = F.scaled_dot_product_attention(
        query_local, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out


causal_attention = replace(taped(_attention), like=_like)
