"""Models of a known layout: an MLP, convolutions or a GPT, with a head of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Layers, and a head of its own: an MLP, convolutions, or the blocks of a GPT."""

    def __init__(self, start: nn.Module, net: Sequence[nn.Module], out: nn.Module) -> None:
        super().__init__()
        self.start, self.net, self.out = start, nn.Sequential(*net), out

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(self.start(x))).square().mean()


class Embedded(nn.Embedding):
    def __init__(self, n_words: int, length: int, width: int) -> None:
        super().__init__(n_words, width)
        self.positions = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.positions


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        each = [f(self.norm_1(x)).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in each))
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))
