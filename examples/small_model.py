"""The model and the data of the framework examples: an MLP over bytes that predicts the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

TEXT = Path(__file__).parent / "wisdom.txt"
LENGTH, VOCABULARY, WIDTH = 8, 256, 32
Row = tuple[Tensor, int]


class NextByte(nn.Module):
    """Returns the loss: cross-entropy of the byte after `ids`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(LENGTH * WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        h = torch.relu(self.up(self.embed(ids).flatten(1)))
        return nn.functional.cross_entropy(self.down(h), target)


def make_model() -> nn.Module:
    """Float64, with the same weights at each call."""
    torch.manual_seed(0)
    return NextByte().double()


def rows(n: int = 64) -> list[Row]:
    """(bytes, the byte after them), in the order of the text."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    return [(text[i : i + LENGTH], int(text[i + LENGTH])) for i in range(n)]


def collate(data: Sequence[Row]) -> dict[str, Tensor]:
    """A batch of keyword inputs."""
    return {
        "ids": torch.stack([ids for ids, _ in data]),
        "target": torch.tensor([target for _, target in data]),
    }
