"""Derivatives in forward, and vmap: a step is eager torch's, and what is refused by name.

Derivatives of other operators are templates of `tests/fuzz/programs` (`DERIVATIVES`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn, vmap
from torch.autograd import grad
from torch.func import functional_call

import autopar
from autopar import Manual
from autopar.errors import NotSupportedError
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in
from tests.parity.table import TOLERANCE

ROWS, WIDTH = 8, 6
Net = Callable[[Tensor], Tensor]


def forces(net: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = net(x)
    ones = torch.ones_like(energy)
    force = -grad(outputs=energy, inputs=x, grad_outputs=ones, create_graph=True)[0]
    return energy.pow(2).mean() + (force - x.detach()).pow(2).sum(1).mean()


def equation(net: Net, x: Tensor) -> Tensor:
    """The second derivatives by each coordinate: derivatives of derivatives."""
    x = x.requires_grad_()
    u = net(x)
    (slope,) = grad(u.sum(), x, create_graph=True)
    curvature = torch.zeros_like(u[:, 0])
    for i in range(2):
        (second,) = grad(slope[:, i].sum(), x, create_graph=True)
        curvature = curvature + second[:, i]
    return (curvature - u.squeeze(-1)).pow(2).mean()


def constant(net: Net, x: Tensor) -> Tensor:
    """Without create_graph, the derivative has no derivative."""
    x = x.requires_grad_()
    out = net(x)
    (slope,) = grad(out.sum(), x, retain_graph=True)
    return (out.squeeze(1) * slope.sum(1)).mean()


def functional(net: Any, x: Tensor) -> Tensor:
    """The derivatives of torch.func, by rows, by weights, in both modes."""
    each = vmap(torch.func.grad(lambda row: net(row[None]).sum()))(x)
    jvp, vjp = cast(Any, torch.func.jvp), cast(Any, torch.func.vjp)
    value, along = jvp(net, (x,), (torch.ones_like(x),))
    out, pull = vjp(net, x)
    weights = dict(net.named_parameters())
    slopes, loss = torch.func.grad_and_value(lambda w: functional_call(net, w, (x,)).pow(2).mean())(
        weights
    )
    moved = {n: w - 0.1 * slopes[n] for n, w in weights.items()}
    inner = functional_call(net, moved, (x,)).pow(2).mean() + loss
    squares = (each.pow(2).sum(1), (value * along)[:, 0], pull(out)[0].pow(2).sum(1))
    return inner + torch.stack(squares).mean()


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


@one_in(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [Manual(), Manual(dp=2)], ids=["one", "dp"])
@pytest.mark.parametrize("loss", [constant, forces, equation, functional])
def test_a_step_is_eagers(loss: Callable[[Any, Tensor], Tensor], layout: Manual) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    report = autopar.verify(
        Model(loss).double(), machine((1, layout.n_ranks)), {"x": x}, precision="fp64",
        manual=layout, microbatches=1,
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.not_compared is None
    assert report.tolerance == report.capture_tolerance == TOLERANCE


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
