"""Attention in shapes that fused kernels do not take: what is captured, and that it is fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.capture_harness import Module, check

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
N, WIDTH = 6, 24
Shapes = tuple[tuple[int, ...], ...]


def attending(shapes: Shapes, mask: tuple[int, ...] | None = None, **options: Any) -> nn.Module:
    """Attention to a query, keys and values that have these shapes."""

    def body(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x).flatten()
        parts = [h[i : i + torch.Size(s).numel()].view(s).sin() for i, s in enumerate(shapes)]
        given = {} if mask is None else {"attn_mask": x.new_ones(mask).tril().bool()}
        out = F.scaled_dot_product_attention(*parts, **options | given)
        return (out * out.cos()).sum()

    return Module(body, WIDTH).double()


def x_of() -> Tensor:
    return torch.randn(8, 2 * N, WIDTH, dtype=torch.float64)


class Kernels(TorchDispatchMode):
    """The names of the kernels that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def in_shapes(
    query: tuple[int, ...], key: tuple[int, ...] | None = None, width: int | None = None
) -> Shapes:
    """Keys are as the query, and values as keys with `width` features, unless given."""
    key = key or query
    return query, key, (*key[:-1], width or key[-1])


FUSED: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "values of fewer features": (in_shapes((2, 3, N, 4), width=2), {"is_causal": True}),
    "values of more features": (in_shapes((2, 3, N, 2), width=4), {"scale": 0.3}),
    "both, with groups": (in_shapes((2, 4, N, 4), (2, 2, N, 4), 3), {"enable_gqa": True}),
    "heads alone": (in_shapes((3, N, 4)), {"is_causal": True}),
    "heads alone, under a mask of each": (in_shapes((3, N, 4)), {"mask": (3, N, N)}),
    "rows alone": (in_shapes((N, 4), (2 * N, 4), 2), {}),
    "five dims": (in_shapes((2, 2, 3, N, 4)), {"mask": (N, N)}),
    "six dims": (in_shapes((2, 1, 2, 3, N, 4), width=3), {"is_causal": True}),
    "one head of keys": (in_shapes((2, 3, N, 4), (2, 1, N, 4)), {}),
    "a mask of each head": (in_shapes((2, 3, N, 4)), {"mask": (3, N, N)}),
    "a mask of four dims": (in_shapes((2, 3, N, 4), width=2), {"mask": (2, 1, N, N)}),
}
UNCHANGED: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "as kernels take it": (in_shapes((2, 3, N, 4)), {"is_causal": True}),
    "groups": (in_shapes((2, 4, N, 4), (2, 2, N, 4)), {"enable_gqa": True}),
    "one row of keys for all": (in_shapes((2, 3, N, 4), (1, 3, N, 4)), {}),
    "other numbers of dims": (in_shapes((2, 3, N, 4), (3, N, 4)), {}),
    "a mask of five dims": (in_shapes((2, 2, 3, N, 4)), {"mask": (2, 2, 3, N, N)}),
}


@pytest.mark.parametrize("name", FUSED)
def test_other_shapes_are_fused(name: str) -> None:
    shapes, options = FUSED[name]
    program = check(attending(shapes, **options), (x_of(),))
    (node,) = (n for n in program.graph.nodes if n.target is ATTENTION)
    query, key, value = (n.meta["val"].shape for n in node.args[:3])
    assert len(query) == len(key) == len(value) == 4
    assert query[-1] == key[-1] == value[-1] == max(s[-1] for s in shapes)
    fakes = [torch.randn(n.meta["val"].shape, requires_grad=True) for n in node.args[:3]]
    with Kernels() as seen:
        mask = node.args[3] if len(node.args) > 3 else None
        mask = None if mask is None else torch.ones(mask.meta["val"].shape, dtype=torch.bool)
        ATTENTION(*fakes, mask, *node.args[4:], **node.kwargs)
    assert FLASH in seen.names


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_calls_stay(name: str) -> None:
    shapes, options = UNCHANGED[name]
    program = check(attending(shapes, **options), (x_of(),))
    (node,) = (n for n in program.graph.nodes if n.target is ATTENTION)
    assert [tuple(n.meta["val"].shape) for n in node.args[:3]] == [*shapes]


def test_a_mask_with_a_gradient_stays() -> None:
    """No fused kernel computes its gradient."""

    def body(self: Any, x: Tensor) -> Tensor:
        h = self.linear(x)[:, None]
        out = F.scaled_dot_product_attention(h, h, h[..., :2], attn_mask=h[..., : h.shape[2]])
        return out.sin().sum()

    program = check(Module(body, WIDTH).double(), (x_of(),))
    (node,) = (n for n in program.graph.nodes if n.target is ATTENTION)
    assert node.args[2].meta["val"].shape[-1] == 2
