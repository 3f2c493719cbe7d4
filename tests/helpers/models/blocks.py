"""Small models of repeated blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.harness import WIDTH

N_BLOCKS = 6


class Block(nn.Module):
    """A residual block of two matmuls with `act` between them."""

    def __init__(self, width: int, act: str = "relu") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = getattr(F, act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Chain(nn.Module):
    """Blocks one after another under a mean of squares."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class SharedBlock(Chain):
    """One block applied several times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__([Block(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(N_BLOCKS):
            x = self.blocks[0](x)
        return x.pow(2).mean()


class TwoStacks(nn.Module):
    """An encoder whose output every block of a decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.decoder = nn.ModuleList(Block(WIDTH, "gelu") for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y + x)
        return y.pow(2).mean()
