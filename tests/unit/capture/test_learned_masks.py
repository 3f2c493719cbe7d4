"""Learned masks of attention: made for one row of the batch where all rows are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from tests.helpers.capture_harness import check

aten = torch.ops.aten
ROWS, HEADS, N, WIDTH = 3, 2, 5, 4


class Biased(nn.Module):
    """Attention with a learned bias per head, under `make_mask(bias, x)`."""

    def __init__(self, make_mask: Callable[..., Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, HEADS * WIDTH), dropout
        self.bias = nn.Parameter(torch.randn(1, HEADS, N, N))
        self.make_mask = make_mask

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        mask = self.make_mask(self.bias, x)
        return F.scaled_dot_product_attention(h, h, h, mask, self.dropout).sin().sum()


def inputs() -> Tensor:
    return torch.randn(ROWS, N, WIDTH, dtype=torch.float64)


def lower(x: Tensor) -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).tril()


REPEATED: dict[str, Callable[..., Tensor]] = {
    "mask of the batch": lambda bias, x: torch.where(
        lower(x).view(1, 1, N, N).expand(len(x), 1, N, N), bias, -1e9
    ),
    "mask without heads": lambda bias, x: torch.where(lower(x).expand(len(x), 1, N, N), bias, -1e9),
    "mask of queries": lambda bias, x: torch.where(
        (torch.arange(N) > 0).view(1, 1, N, 1).expand(len(x), 1, N, N), bias, -1e9
    ),
    "bias": lambda bias, x: bias.expand(len(x), HEADS, N, N).masked_fill(~lower(x), -1e9),
    "both, and more": lambda bias, x: (
        bias.expand(len(x), -1, -1, -1) * lower(x).expand(len(x), 1, N, N).to(bias.dtype)
    ).sin(),
}
OF_EACH_ROW: dict[str, Callable[..., Tensor]] = {
    "input": lambda bias, x: bias + x.mean(-1).view(len(x), 1, 1, N),
    "padding": lambda bias, x: torch.where((x[..., 0] > 0).view(len(x), 1, 1, N), bias, -1e9),
    "rows differ": lambda bias, x: torch.where(
        (torch.arange(len(x)) > 0).view(-1, 1, 1, 1), bias, 2 * bias
    ),
}


def shape_of_mask(make_mask: Callable[..., Tensor]) -> tuple[int, ...]:
    program = check(Biased(make_mask), (inputs(),))
    (attention,) = (
        n for n in program.operators if n.target == aten.scaled_dot_product_attention.default
    )
    mask = attention.args[3]
    assert isinstance(mask, torch.fx.Node)
    return tuple(mask.meta["val"].shape)


@pytest.mark.parametrize("name", REPEATED)
def test_a_mask_that_repeats_is_made_once(name: str) -> None:
    assert shape_of_mask(REPEATED[name]) == (1, HEADS, N, N)


@pytest.mark.parametrize("name", OF_EACH_ROW)
def test_a_mask_of_each_row_stays(name: str) -> None:
    assert shape_of_mask(OF_EACH_ROW[name]) == (ROWS, HEADS, N, N)


def test_dropout() -> None:
    """Attention with dropout and a learned mask is written as its parts."""
    program = capture(Biased(REPEATED["mask of the batch"], 0.5), (inputs().float(),))
    made = {n.target: tuple(n.meta["val"].shape) for n in program.operators}
    assert made[aten.where.ScalarOther] == (1, HEADS, N, N)
    assert made[aten._safe_softmax.default] == (ROWS, HEADS, N, N)


@pytest.mark.parametrize("precision", ["model", "bf16-autocast"])
def test_nothing_of_the_bias_is_made_per_row(precision: Any) -> None:
    program = capture(Biased(REPEATED["bias"]), (inputs().float(),), precision=precision)
    sizes = {n.meta["val"].numel() for n in program.operators if n.meta["val"].shape[-2:] == (N, N)}
    assert sizes == {HEADS * N * N}
