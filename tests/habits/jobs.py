"""The job of a worker that tries a habit."""

from __future__ import annotations

from tests.habits import page
from tests.habits.table import HABITS, try_habit


def try_all(name: str) -> list[str]:
    """What each layout of the habit says (`try_habit`)."""
    assert page.FILES, "importing the page enters all habits"
    return [try_habit(name, layout) for layout in HABITS[name].layouts]
