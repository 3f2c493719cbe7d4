"""Keeps each call of a `torch.autograd.Function` as one operator with its own backward.

While `functions_kept` is entered, `F.apply(...)` of this thread calls F's operator
(`operators/functions.py`), which the trace records whole. What a function calls inside is its own
affair. `CheckpointFunction` is no function of the user but a region (`checkpointed.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
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


def intercept(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    """What `cls.apply(*args, **kwargs)` does in a trace."""
    if cls.__module__.startswith(_OF_TORCH):
        return _exchange.original(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        function, _, *inputs = args
        return reentrant(function, inputs)
    with _exchange.off():
        call = function_call(cls, args, kwargs)
        with torch._C.DisableTorchFunction():
            return call.run()


_exchange = Exchange(torch.autograd.Function.__dict__["apply"].__func__, intercept)
