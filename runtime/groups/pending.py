"""A collective under way: its tensors belong to the backend until it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from autopar.runtime.flight import Pace

T = TypeVar("T")
U = TypeVar("U")


class Work(Protocol):
    """A handle of a backend, as `torch.distributed.Work`."""

    def wait(self) -> Any: ...


class Pending(Generic[T]):
    """A result that is there after `wait`.

    It holds the tensors of the call, `held`, until then: NCCL reads and writes them on a stream
    of its own. On gloo `wait` blocks the host, on NCCL it orders streams.
    """

    def __init__(self, result: T, work: Work | None = None, held: Any = None) -> None:
        self._result, self._work, self._held = result, work, held
        self._changes: list[Callable[[Any], Any]] = []
        self._pace: Pace | None = None

    def timed(self, pace: Pace) -> Pending[T]:
        """The same call, whose wait is not this rank's own time."""
        self._pace = pace
        return self

    def then(self, change: Callable[[T], U]) -> Pending[U]:
        """The same call, whose result goes through `change` when it is there."""
        self._changes.append(change)
        return self  # type: ignore[return-value]

    def wait(self) -> T:
        """The result; must be called once."""
        if self._work is not None:
            if self._pace is None or not self._pace.is_on:
                self._work.wait()
            else:
                with self._pace.waiting():
                    self._work.wait()
        result: Any = self._result
        del self._result, self._work, self._held
        for change in self._changes:
            result = change(result)
        found: T = result
        return found
