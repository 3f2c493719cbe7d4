"""Large Python values that forward reads: another one, and a change inside, are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.helpers.nightly import one_in
from tests.unit.module.test_frozen_values import Changes, setting

X: dict[str, Any] = {"x": torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32}


class Looking(nn.Module):
    """Its output is scaled by what it looks up in a large value."""

    def __init__(self, large: Any, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.large, self.look = large, look

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.look(self.large)).square().mean()


FIRST = itemgetter(0)
NESTED = {"a": {"b": {"c": {"d": {"e": [1.0]}}}}}
LARGE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Changes]] = {
    "a long list": (
        lambda: [1.0] * 300, FIRST,
        [setting("large", [2.0] * 300), lambda m: m.large.__setitem__(0, 3.0)],
    ),
    "a very long list, replaced": (
        lambda: [1.0] * 110_000, FIRST, [setting("large", [2.0] * 110_000)],
    ),
    "a list of lists": (
        lambda: [[1.0] for _ in range(300)], lambda v: v[0][0],
        [lambda m: m.large.__setitem__(0, [2.0])],
    ),
    "a large dict": (
        lambda: dict.fromkeys(range(300), 1.0), FIRST, [lambda m: m.large.update({0: 2.0})],
    ),
    "an array": (
        lambda: np.ones(600), lambda v: float(v[0]),
        [setting("large", np.full(600, 2.0)), lambda m: m.large.fill(3.0)],
    ),
    "a large array, replaced": (
        lambda: np.ones(600_000), lambda v: float(v[0]), [setting("large", np.full(600_000, 2.0))],
    ),
    "nested": (
        lambda: copy.deepcopy(NESTED), lambda v: v["a"]["b"]["c"]["d"]["e"][0],
        [lambda m: m.large["a"]["b"]["c"]["d"].update(e=[2.0])],
    ),
}  # fmt: skip


@one_in(3)
@pytest.mark.filterwarnings("ignore:.*captured again")
@pytest.mark.parametrize("name", LARGE)
def test_large_values_change(name: str) -> None:
    make, look, changes = LARGE[name]
    model = Looking(make(), look).double()
    module: Any = autopar.parallelize(model, (1, 1), X)
    for change in [lambda m: None, *changes]:
        change(model)
        torch.testing.assert_close(module.step(**X), model(**X).detach())
