"""Records of the collectives and messages of one rank, with bytes counted as NCCL counts them.

`Recorder` collects the calls made inside its `with` block. `phase` names the part of the step
that calls belong to.
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

    `size_bytes` is the buffer of an all_reduce, the output of an all_gather, the input of a
    reduce_scatter, the local send buffer of an all_to_all, or the sent tensor.
    """

    kind: CallKind
    axes: tuple[str, ...]
    size_bytes: int
    phase: str


class RankContext:
    """One rank's current phase and its active recorders.

    A group stores its context instead of looking it up by thread: on CUDA, autograd runs
    backward in threads of its own.
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
    """Make the calling thread a rank with its own context."""
    _thread.context = context


class Recorder:
    """Collects the `calls` of the current rank inside a `with` block."""

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
