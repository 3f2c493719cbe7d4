"""Checks of values that only raise are passed over, with a note; other branches are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.helpers.capture_harness import Module, check, x
from tests.helpers.models import checks


@pytest.mark.parametrize("body", [checks.raises, checks.raises_one_of_many, checks.asserts])
def test_checks_are_passed_over_with_a_note(body: Callable[..., Any]) -> None:
    program = check(Module(body), {"a": x()})
    notes = [note for note in program.audit.replaced if note.what == "a check of values"]
    assert any("only raises" in note.why and note.where for note in notes)


def _warns(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    if a.max() > 100:
        y = y * 2
    return y.sum()


def _raises_or_doubles(self: Any, a: Tensor) -> Tensor:
    y = self.linear(a)
    if a.max() > 100:
        raise ValueError("too large")
    elif a.min() < 0:
        y = y * 2
    return y.sum()


def _mixed(self: Any, a: Tensor) -> Tensor:
    assert (a < 100).all() and not bool((a > 100).any() if a.max() > 0 else a.sum() > 0)
    return self.linear(a).sum()


def _raises_after_a_call(self: Any, a: Tensor) -> Tensor:
    if a.max() > 100:
        self.linear.zero_grad()
        raise ValueError("too large")
    return self.linear(a).sum()


@pytest.mark.parametrize("body", [_warns, _raises_or_doubles, _mixed, _raises_after_a_call])
def test_other_branches_are_refused(body: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match="depend"):
        capture(Module(body), {"a": x()})
