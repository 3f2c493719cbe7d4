"""`flex_attention` in the trace: attention under a mask, or in parts.

torch traces it for a compiler, and has no backward of it on a CPU. What it computes is attention
under the mask of its `mask_mod`; capture then looks at that mask as at any other. With a
`score_mod` it is torch's own definition of it, in parts, with all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from autopar.errors import NotSupportedError


@contextmanager
def flex_attention_traced() -> Iterator[None]:
    """While it is open, calls of `flex_attention` are traced so, however it was imported."""
    others: dict[str, Any] = {
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # it is called, not compiled
        "_validate_device": lambda *_: None,
        "_apply_kernel_options": _refuse_statistics,
        "flex_attention_hop": _attention,
    }
    own = {name: getattr(flex, name) for name in others}
    vars(flex).update(others)
    try:
        yield
    finally:
        vars(flex).update(own)


def _refuse_statistics(
    query: Tensor, key: Tensor, value: Tensor, return_lse: bool, kernel_options: Any,
    return_aux: Any = None,
) -> Mapping[str, Any]:  # fmt: skip
    if return_lse or return_aux is not None:
        raise NotSupportedError(
            "flex_attention also returns log-sum-exps or the largest scores",
            hint="leave out return_lse and return_aux, and compute them from queries and keys",
        )
    return {"BACKEND": "AUTO"}


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...], scale: float, *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(the result, nothing, nothing): the arguments of torch's higher-order operator."""
    if score_mod is not flex._identity:
        return math_attention(query, key, value, score_mod, block_mask, scale, {})
    mask_mod, mask = block_mask[-1], None
    if mask_mod is not flex.noop_mask:
        (n_rows, n_heads, n_queries), n_keys = query.shape[:-1], key.shape[-2]
        mask = flex.create_mask(mask_mod, n_rows, n_heads, n_queries, n_keys, query.device)
    is_grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=is_grouped
    )
    return out, None, None
