"""Values of constants that forward reads in Python, and `.data`: as in one process, or refused.

Solvers assert on time grids, codebooks ask a flag whether they are initialised, graph layers mask
the edges of a fixed graph, averages are written to `buffer.data`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import CaptureError, Manual, NotSupportedError
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in
from tests.parity.table import TOLERANCE

ROWS, WIDTH = 4, 4


class Net(nn.Module):
    """A layer, and buffers that `how` reads."""

    grid: Tensor
    ready: Tensor
    edges: Tensor
    mean: Tensor

    def __init__(self, how: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("grid", torch.linspace(0.0, 1.0, 4))
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3], [1, 1, 3, 3]]))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.layer(x)).pow(2).mean()


def solver(net: Net, y: Tensor) -> Tensor:
    assert (net.grid[1:] > net.grid[:-1]).all(), "times must increase"
    for a, b in zip(net.grid[:-1], net.grid[1:], strict=True):
        y = y + (b - a) * net.layer(y).tanh()
    return y


def literal(net: Net, y: Tensor) -> Tensor:
    times = torch.tensor([0.0, 0.5])
    if torch.equal(times, times.sort()[0]):
        y = y * float(times.sum())
    return y.pow_(2)  # `pow_.Scalar`, which is no `pow.Scalar`


def flag(net: Net, y: Tensor) -> Tensor:
    return y * (2.0 if net.ready else 3.0)


def mask(net: Net, y: Tensor) -> Tensor:
    """Messages along the edges that are no loops."""
    kept = net.edges[:, net.edges[0] != net.edges[1]]
    n_kept = int((net.edges[0] != net.edges[1]).sum())
    return torch.zeros_like(y).index_add(0, kept[1], y[kept[0]]) / n_kept


def sized(net: Net, y: Tensor) -> Tensor:
    """Sizes that are tensors, and one that is used as a tensor as well."""
    one: Any = net.edges[0, 1]
    wide = F.pad(y, (one, 2 * one))
    wide = wide + torch.ones(one + 2, wide.shape[1])[:1] * one
    return wide.narrow(1, one, WIDTH).reshape(-1, one).repeat(one, one + 1) ** 2


def data(net: Net, y: Tensor) -> Tensor:
    """A moving mean written to `.data`, then read."""
    net.mean.data.lerp_(y.detach().mean(0), 0.1)
    return y - net.mean + net.layer.weight.data.sum()


HOW = [solver, literal, flag, mask, sized, data]


@one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", HOW)
def test_a_step_is_eagers(how: Callable[[Net, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    report = autopar.verify(
        Net(how).double(), machine((1, 2)), {"x": x}, precision="fp64", manual=Manual(dp=2),
        microbatches=1,
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.not_compared is None
    assert report.tolerance == report.capture_tolerance == TOLERANCE


@one_in(3)
@pytest.mark.parametrize(
    ("how", "name", "value"),
    [
        (solver, "grid", [0.0, 0.1, 0.5, 3.0]),
        (flag, "ready", False),
        (mask, "edges", [[0, 1, 1, 0], [0, 1, 2, 3]]),
        (sized, "edges", [[0, 2, 2, 3], [1, 1, 3, 3]]),
    ],
)
def test_a_buffer_that_changes_later_is_read_again(
    how: Callable[[Net, Tensor], Tensor], name: str, value: Any
) -> None:
    x, net = torch.randn(ROWS, WIDTH, dtype=torch.float64), Net(how).double()
    parallel = autopar.parallelize(net, (1, 1), {"x": x}, manual=Manual())
    before = parallel.step(x=x)
    net.get_buffer(name).copy_(torch.tensor(value))
    with pytest.warns(UserWarning, match=f"`{name}` .* captured again"):
        after = parallel.step(x=x)
    assert abs(after - net(x)) < TOLERANCE < abs(after - before)


def changes(net: Net, y: Tensor) -> Tensor:
    if net.ready:
        y = y * 2
    net.ready.copy_(net.ready.logical_not())
    return y


def by_input(net: Net, y: Tensor) -> Tensor:
    return y if (y > 0).all() else -y


def by_chance(net: Net, y: Tensor) -> Tensor:
    return y if torch.rand(()) > 0.5 else -y


def by_parameter(net: Net, y: Tensor) -> Tensor:
    return y if net.layer.bias.sum() > 0 else -y


def writes_data(net: Net, y: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data * 0.9
    return y


def hides_a_write(net: Net, y: Tensor) -> Tensor:
    z = y.tanh()
    z.data.mul_(2)
    return z


def by_numpy(net: Net, y: Tensor) -> Tensor:
    order = y.detach().sum(1).numpy().argsort()
    return y[torch.from_numpy(order)]


def by_array(net: Net, y: Tensor) -> Tensor:
    return y * float(np.asarray(y.detach()).max())


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (changes, NotSupportedError, "read as a Python value in forward, and changes"),
        (by_input, CaptureError, "depends on tensor values"),
        (by_chance, CaptureError, "depends on tensor values"),
        (by_parameter, CaptureError, "depends on tensor values"),
        (by_numpy, CaptureError, "values leave torch for NumPy"),
        (by_array, CaptureError, "values leave torch for NumPy"),
        (writes_data, NotSupportedError, "data = ...` in forward"),
        (hides_a_write, NotSupportedError, "changes memory"),
    ],
)
def test_what_is_refused(
    how: Callable[[Net, Tensor], Tensor], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        autopar.plan(Net(how), machine((1, 1)), {"x": torch.randn(ROWS, WIDTH)})
