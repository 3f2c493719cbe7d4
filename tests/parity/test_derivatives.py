"""Derivatives in forward, and vmap: what of them is refused by name.

Losses and gradients of the others are eager torch's: `DERIVATIVES` of `tests/fuzz/programs`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, vmap
from torch.autograd import grad

import autopar
from autopar.errors import NotSupportedError
from tests.helpers.jobs import machine

ROWS, WIDTH = 8, 6
Net = Callable[[Tensor], Tensor]


def dropped(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (slope,) = grad(nn.functional.dropout(net(x)).sum(), x, create_graph=True)
    return slope.square().mean()


def backwards(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    net(x).sum().backward()
    assert x.grad is not None
    return x.grad.mean()


def batched(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = net(x)
    return grad(out, x, torch.ones(2, ROWS, 1), is_grads_batched=True)[0].mean()


def jacobian(net: Net, x: Tensor) -> Tensor:
    return vmap(torch.func.jacrev(net))(x).pow(2).mean()


def unseen(net: Net, x: Tensor) -> Tensor:
    def row(v: Tensor) -> Tensor:
        with torch.no_grad():
            scale = net(v[None])
        return net(v[None]) * scale

    return vmap(row)(x).mean()


class Model(nn.Module):
    def __init__(self, loss: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.net, x)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (dropped, "draws random numbers"),
        (backwards, "backward\\(\\) in forward"),
        (batched, "is_grads_batched"),
        (jacobian, "jacrev"),
        (unseen, "no_grad"),
    ],
)
def test_what_is_refused(loss: Callable[[Net, Tensor], Tensor], words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        autopar.plan(Model(loss), machine((1, 1)), {"x": torch.randn(ROWS, WIDTH)})
    assert torch.autograd.grad.__code__.co_name == "grad", "torch is as it was"
