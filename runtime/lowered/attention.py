"""Causal attention over a query whose sequence is sharded contiguously on a group.

Rank r of n holds rows [r·s, (r+1)·s) of the query, and all keys and values. Torch's `is_causal`
aligns the first row with the first key: row i sees keys [0, i]. So on rank r

    row i sees keys j ≤ r·s + i

No row of rank r sees a key from (r+1)·s on. Those keys are cut off, which is exact and saves
their share of the matmuls. What is left is causal again, with the last row aligned with the last
key: torch's `causal_lower_right`, for which GPUs have flash kernels. Nothing is communicated. Each
rank's gradient of the keys and values is its part of the sum over ranks, as a Replicate's gradient
is, so autograd needs no help.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from autopar.runtime.groups import Group
from autopar.runtime.lowered.tape import taped


def _attention(
    query_local: Tensor, key: Tensor, value: Tensor, g: Group, scale: float | None, grouped: bool
) -> Tensor:
    """Rows of `aten.scaled_dot_product_attention(is_causal=True)`: * c e, * t e, * t f -> * c f.

    `grouped` is its `enable_gqa`.
    """
    n_rows, n_keys = query_local.shape[-2], key.shape[-2]
    first_row = g.rank * n_rows
    n_seen = min(first_row + n_rows, n_keys)
    if n_seen < n_keys:
        key, value = key.narrow(-2, 0, n_seen), value.narrow(-2, 0, n_seen)
    mask: Tensor = causal_lower_right(n_rows, n_seen)
    if n_seen < first_row + n_rows:  # fewer keys than rows: the last rows see all of them
        rows = torch.arange(first_row, first_row + n_rows, device=key.device)
        mask = rows.unsqueeze(1) >= torch.arange(n_seen, device=key.device)
    out: Tensor = F.scaled_dot_product_attention(
        query_local, key, value, mask, scale=scale, enable_gqa=grouped
    )
    return out


def _like(
    query_local: Tensor, key: Tensor, value: Tensor, g: Group, scale: float | None, grouped: bool
) -> Tensor:
    """Attention by the same kernel, but of no rank in particular."""
    out: Tensor = F.scaled_dot_product_attention(
        query_local, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out


causal_attention = replace(taped(_attention), like=_like)
