"""`step(outputs=fn)`: fn sees what a loop over `batch.chunk(m)` on one process sees."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import Manual
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in

TOLERANCE = 1e-12
N_ROWS = 8


class Metrics(nn.Module):
    """Returns a dict of scalars; `of` is the kind of loss."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.head, self.of = nn.Linear(6, 4), of

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.head(x)
        right, squares = z.argmax(-1) == y, z.square()
        entropy, summed = F.cross_entropy(z, y), F.cross_entropy(z, y, reduction="sum")
        losses = {
            "mean": entropy,
            "sum": summed,
            "with auxiliary": entropy + 0.1 * squares.mean(),
            "by hand": summed / len(x),
            "elements first": (F.cross_entropy(z, y, reduction="none") / len(x)).sum(),
            "contrastive": entropy + z.softmax(0).square().mean(),
            "root": squares.mean().sqrt(),
        }
        return {
            "loss": losses[self.of], "twice": 2 * losses[self.of], "auxiliary": squares.mean(),
            "sum": z.sum(), "by hand": squares.sum() / len(x),
            "by a tensor": squares.sum() / torch.tensor(float(len(x))), "per class": z.mean(0),
            "sums per class": z.sum(0), "right": right.sum(), "accuracy": right.double().mean(),
            "weights": self.head.weight.square().mean(), "detached": squares.mean().detach(),
            "variance": squares.sum() / (len(x) * z.shape[1]) - 0.5 * squares.mean(), "scores": z,
        }  # fmt: skip


def draw(seed: int, n_rows: int = N_ROWS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(0, 4, (n_rows,), generator=generator)}


def outputs_of_step(of: str, n: int, n_rows: int = N_ROWS) -> tuple[nn.Module, Tensor, list[Any]]:
    torch.manual_seed(0)
    model = Metrics(of).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "microbatches=.*gradient accumulation")
        module = autopar.parallelize(
            model, machine((1, 1)), draw(0), microbatches=n, manual=Manual()
        )
    seen: list[Any] = []
    loss = module.step(outputs=seen.append, **draw(1, n_rows))
    return model, loss, seen


def loop(model: nn.Module, n: int, n_rows: int = N_ROWS) -> list[dict[str, Tensor]]:
    batch = draw(1, n_rows)
    return [model(x, y) for x, y in zip(*(v.chunk(n) for v in batch.values()), strict=True)]


KINDS = ("mean", "sum", "with auxiliary", "by hand", "elements first", "contrastive", "root")


@one_in(6)
@pytest.mark.parametrize("of", KINDS)
def test_a_loop_over_chunks(of: str) -> None:
    model, loss, seen = outputs_of_step(of, 4)
    wanted = loop(model, 4)
    for found, chunk in zip(seen, wanted, strict=True):
        assert found.keys() == chunk.keys()
        for name, value in chunk.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)
    total = torch.stack([found["loss"] for found in seen]).sum()
    torch.testing.assert_close(loss, (total if of == "sum" else total / 4).detach())


@pytest.mark.filterwarnings("ignore:captured a batch")
def test_another_batch_size() -> None:
    model, _, seen = outputs_of_step("with auxiliary", 2, n_rows=6)
    for found, chunk in zip(seen, loop(model, 2, n_rows=6), strict=True):
        for name, value in chunk.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)


class Mixed(nn.Module):
    """The sum of a mean and a sum: no factor makes it the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.head(x)
        return {"loss": F.cross_entropy(z, y) + z.square().sum()}


def test_a_loss_without_a_factor() -> None:
    module = autopar.parallelize(
        Mixed().double(), machine((1, 1)), draw(0), microbatches=2, manual=Manual()
    )
    seen: list[Any] = []
    loss = module.step(outputs=lambda o: seen.append(o["loss"].detach()), **draw(1))
    torch.testing.assert_close(sum(seen) / 2, loss, rtol=0, atol=TOLERANCE)
