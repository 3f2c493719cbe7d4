"""When a search ends before it is done: once its time has passed, if there is a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Of the limit: what a plan takes after its search, the plan as text among it.
_AFTER_SEARCH = 0.02


class TimeUp(Exception):
    """The time of a search has passed, and there is a plan."""


@dataclass
class TimeLimit:
    """Until `deadline`, on the clock of `time.perf_counter`. It counts while `running`."""

    deadline: float = math.inf
    has_plan: bool = False
    _counts: bool = field(default=False, init=False)

    @staticmethod
    def after(seconds: float | None, spent_s: float = 0.0) -> TimeLimit:
        """Of the seconds of a plan, `spent_s` have passed. The search has a third of them at least.
        None: no limit."""
        if seconds is None:
            return TimeLimit()
        left_s = max(seconds * (1 - _AFTER_SEARCH) - spent_s, seconds / 3)
        return TimeLimit(time.perf_counter() + left_s)

    @property
    def left_s(self) -> float | None:
        """At least one second, so that what has begun gets somewhere; None: there is no limit."""
        if math.isinf(self.deadline):
            return None
        return max(1.0, self.deadline - time.perf_counter())

    @contextmanager
    def running(self) -> Iterator[None]:
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def check(self) -> None:
        """Raises `TimeUp`. Whatever takes long calls it before it begins."""
        if self._counts and self.has_plan and time.perf_counter() > self.deadline:
            raise TimeUp
