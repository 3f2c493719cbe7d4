"""Blocks that read parameters of lists beside them: scales and gates of layers, mixing weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.options import Recompute
from tests.helpers.nightly import sampled
from tests.parity.test_equal_blocks import LAYOUTS, MODES


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def scales(n: int) -> list[Tensor]:
    return [torch.full((8,), 1 - k / 20) for k in range(n)]


class Gated(nn.Module):
    """The scales of block i are the i-th gate and the i-th scale from the end."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(n_blocks))
        self.gates = nn.ParameterDict({f"g{k}": s for k, s in enumerate(scales(n_blocks))})
        self.scales = nn.ParameterList(scales(n_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x * self.scales[len(self.blocks) - 1 - i] + block(x) * self.gates[f"g{i}"]
        return x.square().mean()


class TwoEach(nn.Module):
    """Block i has items 2i and 2i + 1 of one list."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(n_blocks))
        self.scales = nn.ParameterList(scales(2 * n_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x * self.scales[2 * i] + torch.tanh(block(x)) * self.scales[2 * i + 1]
        return x.square().mean()


MODELS = {"gated": Gated, "two each": TwoEach}
CASES = [
    (model, n, layout, mode)
    for model in MODELS
    for n in (4, 9)
    for layout in LAYOUTS
    for mode in MODES
]
BY_DAY: list[tuple[str, int, str, Recompute | None]] = [
    ("gated", 4, "alone", None),
    ("gated", 4, "zero-3", "full"),
    ("two each", 9, "zero-2", None),
]


@pytest.mark.parametrize(("model", "n_blocks", "layout", "mode"), sampled(CASES, BY_DAY))
def test_a_step_is_one_processs(
    model: str, n_blocks: int, layout: str, mode: Recompute | None
) -> None:
    torch.manual_seed(0)
    manual, shape = LAYOUTS[layout]
    manual = replace(manual, recompute=mode or "none")
    batch = {"x": torch.randn(8, 8)}
    report = autopar.verify(MODELS[model](n_blocks), shape, batch, manual=manual, precision="fp64")
    assert report.ok, report.text()
