"""Values and gradients that share memory: a step is eager's, on one process and sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from tests.helpers.nightly import one_in

N = 4


class Twice(torch.autograd.Function):
    """A sum whose backward returns one tensor for both terms."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transposed": lambda m, z: z + z.transpose(1, 2),
    "transposed, read again": lambda m, z: (z + z.transpose(1, 2)) * z,
    "flipped": lambda m, z: z + z.flip(1) + z.transpose(1, 2),
    "three views": lambda m, z: z + z.transpose(1, 2) + z.transpose(1, 2).reshape(z.shape),
    "expanded": lambda m, z: z + z[:, :1].expand(-1, N, -1) + z.transpose(1, 2),
    "joined": lambda m, z: torch.cat([z, z.transpose(1, 2)], 1)[:, 2:6],
    "stacked": lambda m, z: torch.stack([z, z.transpose(1, 2), z]).sum(0),
    "chunks": lambda m, z: torch.cat([c + c.flip(0) for c in z.chunk(2, 1)], 1),
    "a slice": lambda m, z: z + torch.cat([z[:, 1:], z[:, :1]], 1),
    "twice": lambda m, z: z + z,
    "a parameter": lambda m, z: z + m.square.t() + m.square,
    "a parameter, transposed": lambda m, z: (z + m.square.t()) + z.transpose(1, 2),
    "a function": lambda m, z: Twice.apply(z, z * 2) + z.transpose(1, 2),
    "a function of a parameter": lambda m, z: Twice.apply(z, m.square.expand_as(z)) * 2 + z,
}


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(N, N), nn.Linear(N, N)
        self.square, self.body = nn.Parameter(torch.randn(N, N)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.into(x))).pow(2).mean()


class Recurrent(nn.Module):
    """Gradients of all states are views of one tensor; a cut hands over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, states = x[:, 0], list[Tensor]()
        for k in range(6):
            h = torch.tanh(self.cell(torch.cat([h, x[:, k]], -1)))
            states.append(h)
        scores = self.head(torch.stack(states, 1))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def test_stages_that_end_inside_of_a_recurrent_loop() -> None:
    batch = {"x": torch.randn(4, 6, 8), "y": torch.randint(3, (4, 6))}
    report = autopar.verify(Recurrent(), (1, 2), batch, precision="fp64", manual=Manual(pp=2))
    assert report.ok, report.text()
    assert report.plan.code()  # verified


@one_in(3)
@pytest.mark.filterwarnings("ignore:autograd.Function Twice has no sharding rule")
@pytest.mark.parametrize("name", BODIES)
def test_a_step_is_eagers(name: str) -> None:
    net, x = Net(BODIES[name]).double(), torch.randn(4, N, N, dtype=torch.float64)
    for mesh, manual in (((1, 1), Manual()), ((1, 2), Manual(tp=2)), ((1, 2), Manual(dp=2))):
        report = autopar.verify(net, mesh, {"x": x}, precision="fp64", manual=manual)
        assert report.ok, report.text()
        assert report.plan.code()  # verified
