"""Keeps torch from printing why a trace fails: the error of autopar says it in short.

It logs, which is dropped in this thread. And it prints the whole graph traced so far, for errors
that have the word "data-dependent": in this thread they have two words.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.capture.trace.exchange import Exchange

_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.export._trace",
    "torch._subclasses.fake_tensor",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Torch neither logs nor prints why a trace of this thread fails."""
    here = threading.get_ident()
    loggers = [logging.getLogger(name) for name in _LOGGERS]

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    for logger in loggers:
        logger.addFilter(is_others)
    try:
        with _exchange.on():
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_others)


def constructed(error: RuntimeError, cond: Any, *args: Any) -> None:
    """What the constructor of torch's error does in a trace."""
    words = (
        a.replace("data-dependent", "data dependent") if isinstance(a, str) else a for a in args
    )
    _exchange.original(error, cond, *words)


_exchange = Exchange(GuardOnDataDependentSymNode.__init__, constructed)
