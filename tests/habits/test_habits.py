"""Habits on two ranks: one in four by day, under its first layout; at night all, under all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.runtime.launch import WorkerPool
from tests.habits.page import PAGE, page
from tests.habits.table import HABITS, try_habit
from tests.helpers.nightly import one_in, sampled

CASES = [(name, layout) for name, one in HABITS.items() for layout in one.layouts]
FIRST = [(name, one.layouts[0]) for name, one in HABITS.items()]


def tried(name: str, layout: str) -> str:
    """The job of a worker, which enters all habits as it imports this file."""
    return try_habit(name, layout)


@one_in(10)
@pytest.mark.parametrize(("name", "layout"), sampled(CASES, FIRST))
def test_habit(name: str, layout: str, workers: Callable[[int], WorkerPool]) -> None:
    texts = workers(2).run(tried, name, layout)
    assert len(texts) == 2


def test_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
