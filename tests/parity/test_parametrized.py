"""Parametrizations and forward hooks compute what the eager module does; habits train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autopar
from autopar import Manual
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in
from tests.parity.table import TOLERANCE


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Capped(nn.Module):
    """A parametrization with a learned scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8, 1), 0.5, dtype=torch.float64))

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() * self.scale


def doubled(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out * 2 + inputs[0]


def shifted(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0].tanh() + 1,)


def with_keywords(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    return out.sigmoid()


def shared(linear: nn.Module) -> None:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    parametrize.register_parametrization(linear, "weight", Capped())


KINDS: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda linear: parametrizations.orthogonal(linear, orthogonal_map="cayley"),
    "custom": shared,
    "forward hook": lambda linear: linear.register_forward_hook(doubled),
    "forward pre hook": lambda linear: linear.register_forward_pre_hook(shifted),
    "keyword hook": lambda linear: linear.register_forward_hook(with_keywords, with_kwargs=True),
}


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()
        KINDS[kind](self.middle)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu())).pow(2).sum()


@one_in(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "manual"),
    [*((kind, Manual(dp=2)) for kind in KINDS), ("custom", Manual(tp=2))],
    ids=[*KINDS, "custom, tp"],
)
def test_a_step_is_eagers(kind: str, manual: Manual) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    report = autopar.verify(
        Net(kind), machine((1, 2)), batch, precision="fp64", manual=manual, microbatches=1,
        fallback="replicate",
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.not_compared is None
    assert report.tolerance == report.capture_tolerance == TOLERANCE
