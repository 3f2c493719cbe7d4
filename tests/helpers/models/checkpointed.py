"""Models that checkpoint parts of themselves, as scripts write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.helpers.jobs import BATCH, WIDTH

N_BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _saved(*_: Any) -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


class Stack(nn.Module):
    """Blocks, of which `how` says what is checkpointed.

    "none", "blocks", "reentrant", "second" (every second block), "part" (of a block), "pairs" (of
    blocks), "nested", "selective", "first" (a layer without an input that requires grad).
    """

    def __init__(self, how: str, n_blocks: int = N_BLOCKS) -> None:
        super().__init__()
        self.how = how
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_blocks)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "first":
            x = checkpoint(self.into, x, use_reentrant=True)
        else:
            x = self.into(x)
        if self.how == "pairs":
            x = checkpoint_sequential(self.blocks, len(self.blocks) // 2, x, use_reentrant=False)
        else:
            for i, block in enumerate(self.blocks):
                x = self.run(block, i, x)
        return x.square().mean()

    def run(self, block: Any, i: int, x: Tensor) -> Tensor:
        if self.how in ("blocks", "reentrant") or (self.how == "second" and i % 2):
            return checkpoint(block, x, use_reentrant=self.how == "reentrant")
        if self.how == "selective":
            return checkpoint(block, x, use_reentrant=False, context_fn=_saved)
        if self.how == "nested":
            return checkpoint(self.inner, block, x, use_reentrant=False)
        if self.how == "part":
            h = block.norm(x)
            return x + block.down(checkpoint(self.narrow, block.up, h, use_reentrant=False))
        return block(x)

    def inner(self, block: Block, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)

    def narrow(self, up: nn.Module, h: Tensor) -> Tensor:
        return torch.tanh(up(h))


HOWS = ("blocks", "reentrant", "second", "part", "pairs", "nested", "selective", "first")


def stack(how: str, n_blocks: int = N_BLOCKS) -> Stack:
    torch.manual_seed(0)
    return Stack(how, n_blocks).double()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Of one eager step; 0 for parameters without gradient."""
    loss = module(**batch())
    loss.backward()
    found = {"loss": loss.detach()}
    for name, p in module.named_parameters():
        found[name] = torch.zeros_like(p) if p.grad is None else p.grad
    return found
