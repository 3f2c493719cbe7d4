"""A trace leaves the user's classes and objects as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from tests.helpers.captures import captured


class Kind:
    scale = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @classmethod
    def unit(cls) -> float:
        return 1.0

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Big(Kind):
    scale = 2.0


class Other(Kind):
    pass


KIND = Kind()


def of_backends() -> float:
    """As einops looks for its backends."""
    return sum(kind.scale for kind in Kind.__subclasses__())


def of_inherited() -> float:
    return Other.scale + Other.unit() + KIND.scale + KIND.twice


def of_changed() -> float:
    """Changes what it read, of an object and of a class that inherits it."""
    KIND.scale, KIND.own, Other.scale = KIND.scale + 1, KIND.own + 1, Other.scale + 1
    return KIND.scale + Other.scale


class Net(nn.Module):
    def __init__(self, number: Any) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.number()).square().mean()


def state() -> list[dict[str, Any]]:
    return [dict(vars(holder)) for holder in (Kind, Big, Other, KIND)]


@pytest.mark.parametrize("number", [of_backends, of_inherited])
def test_a_trace_leaves_no_mark(number: Any) -> None:
    before = state()
    for _ in range(2):
        captured(Net(number), {"x": torch.ones(2, 4)})
        assert state() == before
    assert Big.__subclasses__() == []


def test_a_trace_that_is_refused_leaves_no_mark() -> None:
    before = state()
    with pytest.raises(CaptureError, match="reads and changes"):
        captured(Net(of_changed), {"x": torch.ones(2, 4)})
    assert state() == before
