"""Keeps each call of a `torch.autograd.Function` as one operator with its own backward.

While `functions_kept` is entered, `F.apply(...)` of this thread calls F's operator
(`operators/functions.py`), which the trace records whole. Users keep `fn = F.apply`, a bound method
that no new attribute of a class would reach. So the code of `Function.apply` is exchanged: all
bound methods share it. Threads without a trace, and functions inside functions, run the old code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from autopar.operators import function_call

_apply: FunctionType = torch.autograd.Function.__dict__["apply"].__func__
_original: Callable[..., Any] = FunctionType(
    _apply.__code__, _apply.__globals__, "apply", _apply.__defaults__, _apply.__closure__
)
_lock = threading.Lock()
_n_traces = 0
_here = threading.local()
# Functions of torch's own machinery, which the trace handles.
_OF_TORCH = ("torch._", "torch.fx.")


@contextmanager
def functions_kept() -> Iterator[None]:
    """Calls of functions become calls of operators, in this thread."""
    outer = getattr(_here, "is_tracing", False)
    _count(1)
    _here.is_tracing = True
    try:
        yield
    finally:
        _here.is_tracing = outer
        _count(-1)


def intercept(cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
    """What `cls.apply(*args, **kwargs)` does while any thread traces."""
    if not getattr(_here, "is_tracing", False) or cls.__module__.startswith(_OF_TORCH):
        return _original(cls, *args, **kwargs)
    _here.is_tracing = False
    try:
        call = function_call(cls, args, kwargs)
        with torch._C.DisableTorchFunction():
            return call.run()
    finally:
        _here.is_tracing = True


def _count(change: int) -> None:
    """Exchange the code for the first trace, and back after the last one."""
    global _n_traces
    with _lock:
        _n_traces += change
        _apply.__code__ = _intercepting() if _n_traces else _original.__code__


def _intercepting() -> CodeType:
    """Code that calls `intercept`."""
    __class__: Any = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _ = __class__  # the code that this one replaces has the same free variable
        from autopar.capture.functions import intercept  # these globals are torch's

        return intercept(cls, args, kwargs)

    return apply.__code__
