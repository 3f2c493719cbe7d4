"""Every habit of the table, under each of its layouts, on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.runtime.launch import WorkerPool
from tests.habits.jobs import try_all
from tests.habits.page import PAGE, page
from tests.habits.table import HABITS

Pool = Callable[[int], WorkerPool]


@pytest.mark.parametrize("name", HABITS)
def test_habit(name: str, workers: Pool) -> None:
    texts = workers(2).run(try_all, name)
    assert len(texts) == 2


def test_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
