"""Exchanges the code of a function of torch while a thread traces (`Exchange`).

Users keep functions and bound methods of torch under names of their own, which no new attribute of
a module or a class would reach. They all share one code object, so that is what is exchanged.
Threads without a trace run the old code.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any


class Exchange:
    """Code in place of a function's own, which `original` still runs: where `is_on`, it calls
    `instead` with the same arguments. A generator is exchanged for a generator."""

    def __init__(self, function: Any, instead: Callable[..., Any]) -> None:
        self._function: FunctionType = function
        self._instead, self._code = instead, _delegating(function, len(_EXCHANGES))
        _EXCHANGES.append(self)
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
    def current(self) -> Callable[..., Any]:
        """What this thread runs."""
        return self._instead if self.is_on else self.original

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


_EXCHANGES: list[Exchange] = []


def run(place: int, args: Any, kwargs: Any) -> Any:
    """What exchanged code does."""
    return _EXCHANGES[place].current(*args, **kwargs)


def _delegating(function: FunctionType, place: int) -> CodeType:
    """Code that calls `run`, with the free variables of the code that it replaces."""
    free = ", ".join(function.__code__.co_freevars)
    how = "yield from " if inspect.isgeneratorfunction(function) else ""
    source = f"""
def make({free}):
    def {function.__name__}(*args, **kwargs):
        _ = ({free})
        from autopar.capture.trace.exchange import run  # these globals are torch's
        return ({how}run({place}, args, kwargs))
    return {function.__name__}
"""
    scope: dict[str, Any] = {}
    exec(source, scope)
    code: CodeType = scope["make"](*function.__code__.co_freevars).__code__
    return code
