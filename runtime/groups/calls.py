"""What a rank calls: every collective and message recorded, under NCCL's accounting of bytes.

`Recorder` collects the calls made while it is entered; `phase` names the part of the step they
belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from autopar.placement import PrimitiveKind

CallKind = PrimitiveKind | Literal["send"]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective executed, or one message sent, by this rank.

    `size_bytes`: all_reduce its buffer, all_gather its output, reduce_scatter its input,
    all_to_all the local send buffer, send its tensor.
    """

    kind: CallKind
    axes: tuple[str, ...]
    size_bytes: int
    phase: str


class RankContext:
    """What one rank is doing: the phase its collectives belong to, and who listens.

    Groups hold it rather than look it up, because CUDA backwards run in threads of autograd.
    """

    def __init__(self) -> None:
        self.phase = "forward"
        self.recorders: list[Recorder] = []

    def record(self, call: CollectiveCall) -> None:
        for recorder in self.recorders:
            recorder.calls.append(call)


_process_context = RankContext()
_thread = threading.local()


def current_context() -> RankContext:
    """The context of this thread's rank, or of the process when ranks are processes."""
    context: RankContext | None = getattr(_thread, "context", None)
    return _process_context if context is None else context


def set_thread_context(context: RankContext) -> None:
    """Make the calling thread a rank of its own."""
    _thread.context = context


class Recorder:
    """Collects the `calls` of the current rank while it is entered."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []

    def __enter__(self) -> Recorder:
        self._context = current_context()
        self._context.recorders.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.recorders.remove(self)


@contextmanager
def phase(name: str, context: RankContext | None = None) -> Iterator[None]:
    """Attribute the collectives inside to `name`: forward, backward, grad_sync, loss, ..."""
    context = context or current_context()
    before, context.phase = context.phase, name
    try:
        yield
    finally:
        context.phase = before
