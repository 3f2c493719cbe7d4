"""Buffers that steps change, on thread ranks: equal on all ranks, and equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import NotSupportedError
from autopar.passes.analysis import Analysis, cut
from autopar.passes.inter import find_layers
from tests.helpers.harness import generated_code

__all__ = ["generated_code"]

ROWS, WIDTH = 8, 8


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
        for name in ("x", "y")
    }


class Block(nn.Module):
    """A residual block around a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.linear(x)))


class Normed(nn.Module):
    """Two blocks with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x)) - y).pow(2).mean()


class Counting(nn.Module):
    """A count that the loss does not read, and a history of the weights."""

    count: Tensor
    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("history", torch.zeros(3, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = self.linear.weight.sum(1) * self.count
        return (self.head(F.relu(self.linear(x))) - y).pow(2).mean()


class Averaging(nn.Module):
    """A moving average of the rows, which the loss reads."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return (self.head(h - self.average) - y).pow(2).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": Normed, "counting": Counting, "averaging": Averaging,
}  # fmt: skip


@lru_cache
def analysis_of(model: str) -> Analysis:
    return Analysis.of(capture(MODELS[model](), batch(0), precision="fp64"))


def test_a_buffer_that_two_stages_want_is_named() -> None:
    program = analysis_of("averaging").program
    update = next(b.update for b in program.buffers.values())
    end = [n.name for n in program.operators].index(update or "")
    with pytest.raises(NotSupportedError, match="stage 1 changes buffer `average`, which stage 0"):
        cut(program, [end, len(list(program.operators))])


class Scheduled(Counting):
    """The loss reads the count."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = super().forward(x, y)
        return loss / self.count


class Summing(Averaging):
    """A buffer that is a sum over rows; no other operator mixes rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.average.copy_(x.sum(0))
        return (self.head(x) - y).pow(2).mean()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Normed, "first.norm/batch_norm"),
        (Averaging, "not a sum or mean over rows"),
        (Scheduled, "buffer `count`"),
        (Summing, "buffer `average`"),
    ],
)
def test_what_microbatches_would_see_allows_one(make: Callable[[], nn.Module], words: str) -> None:
    """Statistics of rows, and changes that the next microbatch reads."""
    analysis = Analysis.of(capture(make(), batch(0), precision="fp64"))
    assert analysis.batch.size == ROWS
    with pytest.raises(NotSupportedError) as error:
        analysis.batch.check_divides(2)
    assert words in str(error.value)


def test_no_layer_ends_between_reading_and_changing_a_buffer() -> None:
    analysis = analysis_of("averaging")
    program = analysis.program
    ((placeholder, buffer),) = program.buffers.items()
    names = [node.name for node in program.operators]
    (reader,) = (names.index(user.name) for user in program.node(placeholder).users)
    update = names.index(buffer.update or "")
    assert reader < update
    found = find_layers(analysis, (), n_least=len(names)).ends
    assert not set(found) & set(range(reader + 1, update + 1))
    assert {reader, update + 1} <= set(found)
