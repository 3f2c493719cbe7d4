"""Orthogonal weights, and hooks before forward and with keywords: a step is eager torch's.

Other parametrizations are habits, and weight norm is a template of `tests/fuzz/programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import autopar
from autopar import Manual
from tests.helpers.jobs import machine
from tests.helpers.nightly import one_in
from tests.parity.table import TOLERANCE


def shifted(module: nn.Module, inputs: Any) -> Any:
    return (inputs[0].tanh() + 1,)


def with_keywords(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
    return out.sigmoid()


KINDS: dict[str, Callable[[nn.Linear], object]] = {
    "orthogonal": parametrizations.orthogonal,
    "cayley": lambda linear: parametrizations.orthogonal(linear, orthogonal_map="cayley"),
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


@one_in(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_eagers(kind: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    report = autopar.verify(
        Net(kind), machine((1, 2)), batch, precision="fp64", manual=Manual(dp=2), microbatches=1,
        fallback="replicate",
    )  # fmt: skip
    report.raise_if_wrong()
    assert report.not_compared is None
    assert report.tolerance == report.capture_tolerance == TOLERANCE
