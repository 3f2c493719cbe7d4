"""Checks that need minutes: `make nightly` runs them, all other runs leave them out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

nightly = pytest.mark.nightly
# `one_in(n)`: of n cases of a test the first in ordinary runs, the others at night.
one_in = pytest.mark.one_in
first_by_day = one_in(sys.maxsize)


def deal_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that `one_in(n)` leaves to the night, counted where they are by day so far."""
    n_seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None or item.get_closest_marker("nightly") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if n_seen[test] % mark.args[0]:
            item.add_marker(nightly)
        n_seen[test] += 1


def sampled(every: Sequence[Any], few: Sequence[Any]) -> list[Any]:
    """Parameters of a test: `few` in ordinary runs, the rest of `every` at night."""
    assert set(few) <= set(every)
    return [case if case in few else pytest.param(*case, marks=nightly) for case in every]
