"""A dataset, a classifier and plans for tests of `pm.dataloader`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar import Manual, ParallelModule
from tests.helpers.jobs import machine

PLANS: dict[str, dict[str, Any]] = {
    "tp": {"manual": Manual(tp=2)},
    "dp": {"manual": Manual(dp=2)},
    "zero-3, microbatches": {"manual": Manual(dp=2, zero=3), "microbatches": 2},
    "pp": {"manual": Manual(pp=2), "microbatches": 2},
}
SIZE, SEED = 8, 5
FILLS = {"x": 3.0, "labels": -100}


class Rows(Dataset[dict[str, Tensor]]):
    """Vectors with classes, some of them ignored; `noise` is drawn anew at each read."""

    def __init__(self, n: int = 40, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(0, 4, (n,), generator=generator)
        self.labels[::7] = -100
        self.noise, self.n_read = noise, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.n_read += 1
        drawn = torch.randn(8, dtype=torch.float64) + random.random() + np.random.rand()
        return {"x": self.x[index] + self.noise * drawn, "labels": self.labels[index]}


class Model(nn.Module):
    """A classifier; `of` is its loss, `drop` its dropout, `norm` a norm over the batch."""

    def __init__(self, of: str = "mean", drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop, self.norm = nn.Dropout(drop), nn.BatchNorm1d(16) if norm else nn.Identity()
        self.of = of

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.down(self.drop(F.relu(self.norm(self.up(x)))))
        if self.of == "rows":
            return F.cross_entropy(logits, labels, reduction="sum") / len(labels)

        return F.cross_entropy(logits, labels, reduction=self.of)


def make(**how: Any) -> Model:
    torch.manual_seed(0)
    return Model(**how).double()


def parallel(plan: str, n_rows: int = SIZE, **how: Any) -> ParallelModule:
    example = next(iter(DataLoader(Rows(), batch_size=n_rows)))
    return autopar.parallelize(make(**how), machine((1, 2)), example, **PLANS[plan])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


def alone(**how: Any) -> ParallelModule:
    example = next(iter(DataLoader(Rows(), batch_size=SIZE)))
    return autopar.parallelize(make(**how), machine((1, 1)), example)
