"""Keeps each call of a `torch.autograd.Function` as one operator with its own backward.

While `functions_kept` is entered, `F.apply(...)` of this thread calls F's operator
(`operators/functions.py`), which the trace records whole. What a function calls inside is its own
affair. `CheckpointFunction` is no function of the user but a region (`checkpointed.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.trace.checkpointed import reentrant
from autopar.capture.trace.exchange import Exchange
from autopar.operators import function_call

# Functions of torch's own machinery, which the trace handles.
_OF_TORCH = ("torch._", "torch.fx.")


def functions_kept() -> AbstractContextManager[None]:
    """Calls of functions become calls of operators, in this thread."""
    return _exchange.on()


def intercept(cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
    """What `cls.apply(*args, **kwargs)` does while any thread traces."""
    if not _exchange.is_on or cls.__module__.startswith(_OF_TORCH):
        return _exchange.original(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        function, _, *inputs = args
        return reentrant(function, inputs)
    with _exchange.off():
        call = function_call(cls, args, kwargs)
        with torch._C.DisableTorchFunction():
            return call.run()


def _code() -> CodeType:
    """Code that calls `intercept`."""
    __class__: Any = None

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        _ = __class__  # the code that this one replaces has the same free variable
        from autopar.capture.trace.functions import intercept  # these globals are torch's

        return intercept(cls, args, kwargs)

    return apply.__code__


_exchange = Exchange(torch.autograd.Function.__dict__["apply"].__func__, _code())
