"""When a search ends before it is done: once its time has passed.

Without a plan, it has as much time again, and `_LEAST_AGAIN_S` at least. What it takes to compile
the solvers' loops, once per installation, does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autopar.passes.solvers.problem import compile_s

# Of the limit: what a plan takes after its search, the plan as text among it.
_AFTER_SEARCH = 0.02
_LEAST_AGAIN_S = 20.0


class TimeUp(Exception):
    """The time of a search has passed."""


@dataclass
class TimeLimit:
    """Until `deadline`, on the clock of `_now_s`, and `again_s` more without a plan. It counts
    while `running`."""

    deadline: float = math.inf
    again_s: float = 0.0
    has_plan: bool = False
    _counts: bool = field(default=False, init=False)

    @staticmethod
    def after(seconds: float | None, spent_s: float = 0.0) -> TimeLimit:
        """Of the seconds of a plan, `spent_s` have passed. The search has a third of them at least.
        None: no limit."""
        if seconds is None:
            return TimeLimit()
        left_s = max(seconds * (1 - _AFTER_SEARCH) - spent_s, seconds / 3)
        return TimeLimit(_now_s() + left_s, max(seconds, _LEAST_AGAIN_S))

    @property
    def left_s(self) -> float | None:
        """At least one second, so that what has begun gets somewhere; None: there is no limit."""
        if math.isinf(self.deadline):
            return None
        return max(1.0, self.deadline - _now_s())

    @contextmanager
    def running(self) -> Iterator[None]:
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def check(self) -> None:
        """Raises `TimeUp`. Whatever takes long calls it before it begins."""
        last = self.deadline + (0.0 if self.has_plan else self.again_s)
        if self._counts and _now_s() > last:
            raise TimeUp


def _now_s() -> float:
    return time.perf_counter() - compile_s()
