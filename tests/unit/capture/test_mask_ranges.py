"""Masks that become a range of keys per row; those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.attention import ranges
from autopar.operators import ATTENTION_RANGES
from tests.helpers.capture_harness import Module, check

N, WIDTH, HEADS, WINDOW = 64, 4, 2, 3
MakeMask = Callable[..., Tensor]  # (x, positions [b, s]) -> the mask


def attending(make_mask: MakeMask, **options: Any) -> nn.Module:
    def body(self: Any, x: Tensor, positions: Tensor | None = None) -> Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mask = make_mask(x, positions)
        return F.scaled_dot_product_attention(h, h.sin(), h.cos(), mask, **options).sin().sum()

    return Module(body)


def xs() -> Tensor:
    return torch.randn(2, N, WIDTH, dtype=torch.float64)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(x.shape[1])
    return at[:, None], at[None]


def window(x: Tensor, _: Any) -> Tensor:
    row, column = places(x)
    return (column <= row) & (column > row - WINDOW)


def distance(x: Tensor, _: Any) -> Tensor:
    row, column = places(x)
    return torch.logical_and(row - column < WINDOW, column - row <= 0)


def blocks(x: Tensor, _: Any) -> Tensor:
    """Blocks of four that see nothing else, in floating point."""
    row, column = places(x)
    return (row // 4 == column // 4)[None, None]


def rows_that_see_nothing(x: Tensor, _: Any) -> Tensor:
    row, column = places(x)
    return (column >= row + 1) & (row + 4 > column)


def a_window_per_head(x: Tensor, _: Any) -> Tensor:
    row, column = places(x)
    return column >= (row - torch.tensor([1, 2])[:, None, None]).clamp(min=0)


FEW = {
    "window": window,
    "distance": distance,
    "blocks": blocks,
    "rows that see nothing": rows_that_see_nothing,
    "expanded": lambda x, _: window(x, _).expand(len(x), 1, N, N),
}


def operators(model: nn.Module, *batch: Tensor) -> list[Any]:
    model.double()
    return [n.target for n in capture(model, batch).graph.nodes]


@pytest.mark.parametrize("name", FEW)
def test_ranges(name: str) -> None:
    model = attending(FEW[name])
    assert ATTENTION_RANGES in operators(model, xs())
    check(model, (xs(),))


def test_what_is_shown_is_known() -> None:
    """The share of pairs, by which a plan prices attention."""
    model = attending(window).double()
    (node,) = (n for n in capture(model, (xs(),)).graph.nodes if n.target is ATTENTION_RANGES)
    shown = window(torch.empty(1, N), None).double().mean()
    assert node.args[5] == pytest.approx(float(shown))


def decreasing(x: Tensor, _: Any) -> Tensor:
    row, column = places(x)
    return column.flip(1) < row - (N - WINDOW)


KEPT: dict[str, tuple[MakeMask, dict[str, Any]]] = {
    "more than few keys": (a_window_per_head, {}),
    "columns that decrease": (decreasing, {}),
    "two ranges": (lambda x, _: ~window(x, _), {}),
    "either": (lambda x, _: window(x, _) | window(x, _).mT, {}),
    "dropout": (window, {"dropout_p": 0.5}),
    "other dtypes": (lambda x, _: places(x)[0].float() // 4 == places(x)[1] // 4, {}),
    "flags": (lambda x, _: (places(x)[0] < 2) == (places(x)[1] < 1), {}),
    "half a row": (lambda x, _: distance(x, _) & (places(x)[0] - places(x)[1] < 0.5), {}),
    "numbers": (lambda x, _: torch.zeros(N, N).masked_fill(window(x, _), 1.0).double(), {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name: str) -> None:
    make_mask, options = KEPT[name]
    model = attending(make_mask, **options)
    assert ATTENTION_RANGES not in operators(model, xs())
    if not options:
        check(model, (xs(),))


def in_documents(x: Tensor, positions: Tensor) -> Tensor:
    """As transformers numbers packed documents."""
    before = positions[:, :1] - 1
    number = (positions.diff(dim=1, prepend=before) != 1).cumsum(-1)
    is_same = number[:, None, :, None] == number[:, None, None, :]
    return is_same & (positions[:, None, None, :] <= positions[:, None, :, None])


def in_windows_of_documents(x: Tensor, positions: Tensor) -> Tensor:
    is_near = positions[:, None, None, :] > positions[:, None, :, None] - WINDOW
    return in_documents(x, positions) & is_near


def packed(*lengths: int) -> Tensor:
    assert sum(lengths) == N
    return torch.cat([torch.arange(n) for n in lengths])


@pytest.mark.parametrize("make_mask", [in_documents, in_windows_of_documents])
def test_documents(make_mask: MakeMask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their lengths are known only at a step; a document of one token, and a batch without."""
    model = attending(make_mask)
    positions = torch.stack([packed(7, 1, 12, 44), packed(64)])
    assert ATTENTION_RANGES not in operators(model, xs(), positions)
    monkeypatch.setattr(ranges, "_LARGE_BYTES", N * N)
    found = operators(model, xs(), positions)
    assert ATTENTION_RANGES in found and torch.ops.aten.eq.Tensor not in found
    check(model, (xs(), positions))


def test_numbers_that_may_decrease_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that the user numbers, and positions without documents."""
    monkeypatch.setattr(ranges, "_LARGE_BYTES", N * N)
    for make_mask in (
        lambda x, ids: ids[:, None, :, None] == ids[:, None, None, :],
        lambda x, at: at[:, None, :, None] >= at[:, None, None, :],
    ):
        model, ids = attending(make_mask), torch.randint(3, (2, N))
        assert ATTENTION_RANGES not in operators(model, xs(), ids)
        check(model, (xs(), ids))
