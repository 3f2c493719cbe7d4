"""What capture refuses, and the line it points to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError, OptionError
from tests.helpers.capture_harness import Module


def _branches(self: Any, a: torch.Tensor) -> torch.Tensor:
    y = self.linear(a)
    if y.sum() > 0:
        return y.sum()
    return y.mean()


def _selects(self: Any, a: torch.Tensor) -> torch.Tensor:
    return self.linear(a)[a[:, 0] > 0].sum()


def _reads_a_number(self: Any, a: torch.Tensor) -> torch.Tensor:
    return self.linear(a).sum() * a.sum().item()


def _keeps_a_tensor(self: Any, a: torch.Tensor) -> torch.Tensor:
    self.kept = self.linear(a)
    return self.kept.sum()


def _fails(self: Any, a: torch.Tensor) -> torch.Tensor:
    return self.no_such_thing(a)


@pytest.mark.parametrize(
    ("body", "reason", "has_line"),
    [
        (_branches, "depend", True),
        (_selects, "depends on the data", False),
        (_reads_a_number, "depends on the data", False),
        (_keeps_a_tensor, "self.kept", False),
        (_fails, "no_such_thing", True),
    ],
)
def test_what_cannot_be_traced_names_the_line(
    body: Callable[..., Any], reason: str, has_line: bool
) -> None:
    with pytest.raises(CaptureError, match=reason) as error:
        capture(Module(body), (torch.randn(2, 4),))
    assert "hint: " in str(error.value)
    if has_line:
        first = body.__code__.co_firstlineno
        lines = range(first + 1, first + 4)
        assert any(f"{__file__}:{line}\n" in str(error.value) for line in lines)


class Selects(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)[input[:, 0] > 0].sum()


def test_a_shape_that_depends_on_data_names_the_line_of_forward() -> None:
    with pytest.raises(CaptureError, match=r"aten\.index\.Tensor") as error:
        capture(Selects(4, 4), (torch.randn(2, 4),))
    line = Selects.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}\n" in str(error.value)


def _loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def test_operators_of_the_loss_function_point_to_it() -> None:
    program = capture(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), loss_fn=_loss)
    assert program.loss is not None
    assert program.sources[program.loss] == f"{__file__}:{_loss.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, CaptureError, "no scalar loss, but: a float32 tensor of shape (2, 4)"),
        ({"loss_fn": lambda out, batch: out}, CaptureError, "loss_fn of Sequential returned"),
        ({"loss_fn": lambda out, batch: batch[0].sum()}, CaptureError, "no trainable parameter"),
        ({"precision": "fp8"}, OptionError, "fp8"),
    ],
)
def test_misuse_is_explained(
    options: dict[str, Any], kind: type[AutoparError], message: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(kind) as error:
        capture(model, (torch.randn(2, 4),), **options)
    assert message in str(error.value)
