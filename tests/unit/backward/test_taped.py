"""Gradients that a taped operator returns are tensors of its own: whoever has them may write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual
from autopar.runtime.lowered import taped
from tests.helpers.tensors import random_tensor

ROWS, WIDTH = 16, 8


class Straight(torch.autograd.Function):
    """Its backward returns its argument, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x.sign() + y.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], grads[0]


def straight(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = Straight.apply(x, y)
    return found


def test_no_two_gradients_share_memory() -> None:
    operator, x = taped(straight), torch.ones(4)
    _, kept = operator.forward(x, x + 1)
    given = torch.ones(4)
    found = operator.backward(kept, (), (given,), (True, True))
    storages = {t.untyped_storage().data_ptr() for t in (given, *found) if t is not None}
    assert len(storages) == 3


class Shared(nn.Module):
    """The gradient of `total` is also that of `k`, and of `h`, which has a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.k = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, h = self.k(x).tanh(), self.h(x)
        other = h.tanh()
        total = straight(h, x) + k
        return total.pow(3).mean() + other.pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*kept whole")
def test_a_step_has_the_gradients_of_eager() -> None:
    torch.manual_seed(0)
    module, x = Shared().double(), random_tensor(0, ROWS, WIDTH)
    parallel = autopar.parallelize(module, (1, 1), {"x": x}, manual=Manual())
    parallel.step(x=x)
    module(x).backward()
    found = parallel.full_gradients()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad), name
