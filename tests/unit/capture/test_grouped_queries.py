"""Heads of keys and values that a model repeats: which become `enable_gqa`, which stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.operators import ATTENTION_DROPOUT
from tests.helpers.capture_harness import Module, check

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
N, WIDTH, HEADS, SHARED = 5, 12, 6, 2
GROUP = HEADS // SHARED
Repeat = Callable[[Tensor], Tensor]  # b t (n e) -> b h t e


def heads(x: Tensor, n: int = SHARED) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def as_transformers(x: Tensor) -> Tensor:
    h = heads(x)
    b, n, t, e = h.shape
    return h[:, :, None, :, :].expand(b, n, GROUP, t, e).reshape(b, n * GROUP, t, e)


def before_the_transpose(x: Tensor) -> Tensor:
    return x.unflatten(-1, (SHARED, -1)).repeat_interleave(GROUP, 2).transpose(1, 2)


REPEATED: dict[str, tuple[int, Repeat]] = {
    "as transformers": (SHARED, as_transformers),
    "interleaved": (SHARED, lambda x: heads(x).repeat_interleave(GROUP, 1)),
    "cast": (SHARED, lambda x: as_transformers(x.float()).double()),
    "interleaved before the transpose": (SHARED, before_the_transpose),
    "one head": (1, lambda x: heads(x, 1).expand(-1, HEADS, -1, -1)),
}


def attending(n_shared: int, keys: Repeat, values: Repeat, **options: Any) -> nn.Module:
    """Attention of x to itself, whose keys and values have a width of `n_shared` heads."""

    def body(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)
        shared = h[..., : n_shared * WIDTH // HEADS]
        query = heads(h, HEADS)
        given = {name: x.new_ones(N, N).tril() for name in options if name == "attn_mask"}
        out = F.scaled_dot_product_attention(
            query, keys(shared.sin()), values(shared.cos()), **options | given
        )
        return out.sin().sum()

    return Module(body, WIDTH)


def xs(rows: int = 2) -> Tensor:
    return torch.randn(rows, N, WIDTH, dtype=torch.float64)


def attention_of(model: nn.Module, x: Tensor) -> tuple[tuple[int, ...], bool]:
    """Shape of its keys, and `enable_gqa`."""
    model.double()
    (node,) = (
        n for n in capture(model, (x,)).graph.nodes if n.target in (ATTENTION, ATTENTION_DROPOUT)
    )
    grouped = node.kwargs.get("enable_gqa", node.args[-1] is True)
    return tuple(node.args[1].meta["val"].shape), grouped


@pytest.mark.parametrize("name", REPEATED)
def test_groups(name: str) -> None:
    n_shared, repeat = REPEATED[name]
    model = attending(n_shared, repeat, repeat, is_causal=True)
    assert attention_of(model, xs()) == ((2, n_shared, N, WIDTH // HEADS), True)
    check(model, (xs(),), tolerance=1e-5 if name == "cast" else 1e-12)


def test_groups_with_dropout() -> None:
    model = attending(SHARED, as_transformers, as_transformers, dropout_p=0.25)
    assert attention_of(model, xs()) == ((2, SHARED, N, WIDTH // HEADS), True)


def test_transposed_heads_are_repeated_no_more() -> None:
    """Nothing else of the repetition is left."""
    model = attending(SHARED, before_the_transpose, before_the_transpose)
    targets = {n.target for n in capture(model, (xs(),)).graph.nodes}
    assert torch.ops.aten.expand.default not in targets


REPEATED_OTHERWISE: dict[str, tuple[Repeat, Repeat, dict[str, Any]]] = {
    "under a mask": (as_transformers, as_transformers, {"attn_mask": None}),
    "other heads of a group": (lambda x: heads(x).repeat(1, GROUP, 1, 1),) * 2 + ({},),
    "values in other groups": (as_transformers, lambda x: heads(x).repeat(1, GROUP, 1, 1), {}),
    "keys alone": (as_transformers, lambda x: as_transformers(x).flip(1), {}),
}


@pytest.mark.parametrize("name", REPEATED_OTHERWISE)
def test_what_stays(name: str) -> None:
    keys, values, options = REPEATED_OTHERWISE[name]
    model = attending(SHARED, keys, values, **options)
    assert attention_of(model, xs()) == ((2, HEADS, N, WIDTH // HEADS), False)
    check(model, (xs(),))
