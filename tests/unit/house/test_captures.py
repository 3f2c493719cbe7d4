"""`captured` shares a program between tests only if a new capture could not differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Watch
from autopar.program.graph import Program
from tests.helpers.captures import captured

WIDTH = 4


class Scaled(nn.Module):
    """An attribute, a buffer and parameters; `tied` makes two weights one parameter."""

    def __init__(self, factor: float = 2.0, shift: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.second.weight = self.first.weight
        self.factor = factor
        self.register_buffer("shift", torch.full((WIDTH,), shift))

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.factor + self.get_buffer("shift")).sum()


def of(model: nn.Module, n_rows: int = 2, **options: Any) -> Program:
    return captured(model, {"x": torch.randn(n_rows, WIDTH)}, **options)


def frozen() -> nn.Module:
    model = Scaled()
    model.first.weight.requires_grad_(False)
    return model


def doubled(outputs: Tensor, batch: Any) -> Tensor:
    return 2 * outputs


def test_values_of_parameters_and_inputs_are_no_part_of_it() -> None:
    assert of(Scaled()).graph is of(Scaled()).graph
    assert of(Scaled(), precision="model", training=True).graph is of(Scaled()).graph


def test_a_shared_program_watches_the_buffers_of_its_own_model() -> None:
    first, second = Scaled(), Scaled()
    programs = of(first), of(second)
    second.get_buffer("shift").add_(1)
    assert not Watch(first, None, programs[0].frozen).changed()
    assert [*Watch(second, None, programs[1].frozen).changed()] == [
        "`shift` of the model's buffers"
    ]


OTHERS: dict[str, Callable[[], Program]] = {
    "an attribute": lambda: of(Scaled(factor=3.0)),
    "values of a buffer": lambda: of(Scaled(shift=1.0)),
    "one parameter for two": lambda: of(Scaled(tied=True)),
    "a parameter without gradient": lambda: of(frozen()),
    "the mode": lambda: of(Scaled().eval()),
    "a dtype": lambda: captured(Scaled().double(), {"x": torch.randn(2, WIDTH).double()}),
    "the device": lambda: of(Scaled().to("meta")),
    "rows": lambda: of(Scaled(), n_rows=3),
    "precision": lambda: of(Scaled(), precision="fp64"),
    "a loss": lambda: of(Scaled(), loss_fn=doubled),
}


@pytest.mark.parametrize("what", OTHERS)
def test_programs_that_may_differ_are_captured_each(what: str) -> None:
    found = OTHERS[what]()
    assert found.graph is not of(Scaled()).graph
    assert found.graph is OTHERS[what]().graph
