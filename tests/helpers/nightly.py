"""Checks that need minutes: `make nightly` runs them, all other runs leave them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

nightly = pytest.mark.nightly


def sampled(every: Sequence[Any], few: Sequence[Any]) -> list[Any]:
    """Parameters of a test: `few` in ordinary runs, the rest of `every` at night."""
    assert set(few) <= set(every)
    return [case if case in few else pytest.param(*case, marks=nightly) for case in every]


def first_by_day(every: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first in ordinary runs, the others at night."""
    first, *others = every
    return [first, *(pytest.param(case, marks=nightly) for case in others)]
