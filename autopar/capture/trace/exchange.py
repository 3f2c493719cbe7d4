"""Exchanges the code of a function of torch while a thread traces (`Exchange`).

Users keep functions and bound methods of torch under names of their own, which no new attribute of
a module or a class would reach. They all share one code object, so that is what is exchanged.
Threads without a trace run the old code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any


class Exchange:
    """`code` in place of a function's own, which `original` still runs.

    The new code runs in every thread, so it must ask `is_on` and call `original` where it is not.
    """

    def __init__(self, function: FunctionType, code: CodeType) -> None:
        self._function, self._code = function, code
        own = function.__code__, function.__globals__, function.__name__
        self.original: Callable[..., Any] = FunctionType(
            *own, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self._own_code = function.__code__
        self._lock = threading.Lock()
        self._n_traces = 0
        self._here = threading.local()

    @property
    def is_on(self) -> bool:
        """Does this thread trace?"""
        return getattr(self._here, "is_on", False)

    @contextmanager
    def on(self) -> Iterator[None]:
        """This thread traces."""
        self._count(1)
        try:
            with self._set(True):
                yield
        finally:
            self._count(-1)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within a trace, what runs here is not seen."""
        with self._set(False):
            yield

    @contextmanager
    def _set(self, is_on: bool) -> Iterator[None]:
        outer, self._here.is_on = self.is_on, is_on
        try:
            yield
        finally:
            self._here.is_on = outer

    def _count(self, change: int) -> None:
        """Exchange the code for the first trace, and back after the last one."""
        with self._lock:
            self._n_traces += change
            self._function.__code__ = self._code if self._n_traces else self._own_code
