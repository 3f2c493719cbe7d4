"""Tables that know the model's modules by identity: the copy that is traced is not in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import NotSupportedError

BY_ID: dict[int, float] = {}
BY_MODULE: dict[nn.Module, float] = {}
DOUBLED: set[nn.Module] = set()

SCALES: dict[str, Callable[[nn.Module], float]] = {
    "id": lambda module: BY_ID.get(id(module), 1.0),
    "module": lambda module: BY_MODULE.get(module, 1.0),
    "set": lambda module: 2.0 if module in DOUBLED else 1.0,
}


class Block(nn.Module):
    """Scales its result by what a table says of it."""

    def __init__(self, scale: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale(self)


class Stack(nn.Module):
    """Five blocks."""

    def __init__(self, scale: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(scale) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Scaled(nn.Module):
    """Has the table itself: it is copied with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.scales = {self.blocks[2]: 2.0}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scales.get(block, 1.0)
        return x.pow(2).mean()


def batch() -> dict[str, Any]:
    return {"x": torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("how", SCALES)
def test_a_table_beside_the_model_is_refused(how: str) -> None:
    model = Stack(SCALES[how]).double()
    known = model.blocks[2]
    BY_ID[id(known)] = BY_MODULE[known] = 2.0
    DOUBLED.add(known)
    try:
        with pytest.raises(
            NotSupportedError, match=r"knows `blocks\.2` by i[\s\S]*an attribute of"
        ):
            autopar.parallelize(model, (1, 1), batch())
    finally:
        for table in (BY_ID, BY_MODULE, DOUBLED):
            table.clear()
    pm = autopar.parallelize(model, (1, 1), batch())  # tables of others do no harm
    assert torch.equal(pm.step(**batch()), model(**batch()).detach())


def test_a_table_of_the_model_is_its_own() -> None:
    model = Scaled().double()
    pm = autopar.parallelize(model, (1, 1), batch())
    assert (pm.step(**batch()) - model(**batch())).abs().item() < 1e-12
