"""Causal attention over a query whose sequence is sharded contiguously on a group.

Rank r of n holds rows [r·s, (r+1)·s) of the query, and all keys and values. Torch's `is_causal`
aligns the first row with the first key: row i sees keys [0, i]. So on rank r

    row i sees keys j ≤ r·s + i

No row of rank r sees a key from (r+1)·s on. Those keys are cut off, which is exact and saves
their share of the matmuls. Nothing is communicated. Each rank's gradient of the keys and values
is its part of the sum over ranks, as a Replicate's gradient is, so autograd needs no help.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.groups import Group


def causal_attention(
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
    mask = None
    if first_row:
        rows = torch.arange(first_row, first_row + n_rows, device=key.device)
        mask = rows.unsqueeze(1) >= torch.arange(n_seen, device=key.device)
    out: Tensor = torch.ops.aten.scaled_dot_product_attention.default(
        query_local, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out
