"""Models with what a chain of stages does not have, for tests of pipelines."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.passes.analysis import Analysis
from tests.helpers.captures import captured

N_ROWS, WIDTH = 16, 8


class Skip(nn.Module):
    """`a` makes what the last layers read: real numbers, a mask, indices, and a constant of
    the step without gradient; `b` and `c` read one tensor too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.a(x).tanh()
        mask, index, still = h > 0, (ids + 1) % WIDTH, h.detach().exp()
        u = self.b(h).relu()
        v = self.c(h + u).tanh()
        w = self.d(v) * still + self.table(index)
        return (torch.where(mask, w, h) + u).pow(2).mean()


class Frozen(nn.Module):
    """The first layer and a bias in the middle do not learn; `act` has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act, self.c = (
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
        )  # fmt: skip
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(self.a(x)))).pow(2).mean()


class Tied(nn.Module):
    """One weight in three layers, and a fourth layer between the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.b.weight = self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh()).pow(2).mean()


class SideOutput(nn.Module):
    """`extra` carries gradient but does not reach the loss; it is an output, as `z` is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.side, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        extra = self.side(h)
        z = self.c(self.b(h).tanh())
        return {"loss": z.pow(2).mean(), "z": z, "extra": extra}


def rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_ROWS, WIDTH, dtype=torch.float64, generator=generator)


def batch_of(model: type[nn.Module], seed: int) -> dict[str, Tensor]:
    """Rows, and indices for `Skip`."""
    if model is Skip:
        return {"x": rows(seed), "ids": torch.arange(N_ROWS) % WIDTH}
    return {"x": rows(seed)}


def analysis_of(model: type[nn.Module], training: bool = True) -> Analysis:
    """Captured in float64."""
    program = captured(model(), batch_of(model, 0), training=training, precision="fp64")
    return Analysis.of(program)
