"""How long a rank computes in each action of a step, without what it waits for other ranks.

    own seconds of an action  =  from its begin to that of the next  -  waits inside

A wait is the time until a collective or a message of another rank is there. All ranks of a step
take equally long, because the fast ones wait; their own seconds differ. Nothing is measured unless
`is_on`. The clock may be another one: on a GPU, marks are events of its stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Span:
    """One run of an action: marks of its begin and end, and of the waits inside."""

    action: str
    begun: Any
    ended: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


class Pace:
    """Measures one rank. `mark()` is a point in time, `seconds(a, b)` the time between two."""

    def __init__(self) -> None:
        self.is_on = False
        self.mark: Callable[[], Any] = time.perf_counter
        self.seconds: Callable[[Any, Any], float] = lambda a, b: b - a
        self._open: _Span | None = None
        self._spans: list[_Span] = []

    def begin(self, action: str) -> None:
        """An action begins, and the one before has ended."""
        self.end()
        if self.is_on:
            self._open = _Span(action, self.mark())

    def end(self) -> None:
        """The last action of a step has ended."""
        if self._open is not None:
            self._open.ended = self.mark()
            self._spans.append(self._open)
            self._open = None

    def drop(self) -> None:
        """The action under way has failed: it is not counted."""
        self._open = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others."""
        span = self._open
        if span is None:
            yield
            return
        begun = self.mark()
        yield
        span.waits.append((begun, self.mark()))

    def take(self) -> dict[str, float]:
        """Action -> own seconds, the median of its runs since the last call."""
        found: dict[str, list[float]] = {}
        for span in self._spans:
            waited_s = sum(self.seconds(a, b) for a, b in span.waits)
            own_s = self.seconds(span.begun, span.ended) - waited_s
            found.setdefault(span.action, []).append(own_s)
        self._spans = []
        return {action: statistics.median(runs) for action, runs in found.items()}
