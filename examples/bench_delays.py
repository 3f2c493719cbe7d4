"""Collectives as on a slow network: `make bench-runtime` measures overlap with them.

A collective of n bytes takes alpha + n · beta seconds more. The network works beside the rank's
own thread, and carries one call of a group at a time. So a call issued at time t ends no earlier
than

    end = max(t, end of the group's call before) + alpha + n · beta        (`Delays._end_s`)

A call that blocks sleeps until then. A call that returns a handle, an object with `wait()`, sleeps
in its wait. So a delay costs nothing where a rank works meanwhile, and all of it where it waits.

Bytes are those that the group records of the call, as NCCL counts them. A method of the group that
records no call has no delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from torch import Tensor

from autopar.placement import PrimitiveKind
from autopar.runtime.groups import DistGroup, Group


class DelayedHandle:
    """A handle whose `wait` lasts until `end_s` at least; all else is the handle's own."""

    def __init__(self, handle: Any, end_s: float, delays: Delays) -> None:
        self._handle, self._end_s, self._delays = handle, end_s, delays

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._handle.wait(*args, **kwargs)
        self._delays.sleep_until(self._end_s)
        return result

    def then(self, change: Callable[[Any], Any]) -> DelayedHandle:
        self._handle = self._handle.then(change)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Delays:
    """Delays every collective of `DistGroup`s inside a `with` block, on this rank.

    Every rank must be inside at the same time. Calls of all groups of the same ranks share one
    network. `n_calls`, `size_bytes` and `delay_s` count what was delayed; `clear` zeroes them.
    `clock` and `sleep` are replaced in tests.
    """

    def __init__(
        self,
        alpha_s: float,
        beta_s_per_byte: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.alpha_s, self.beta_s_per_byte = alpha_s, beta_s_per_byte
        self._clock, self._sleep = clock, sleep
        self._ends_s: dict[tuple[int, ...], float] = {}
        self._recorded: list[list[int]] = []  # bytes of the calls of each method being run
        self.clear()

    def clear(self) -> None:
        self.n_calls, self.size_bytes, self.delay_s = 0, 0, 0.0

    def __enter__(self) -> Delays:
        self._own = {name: vars(DistGroup).get(name) for name in (*_public_methods(), "_record")}
        for name in self._own:
            make = self._noting if name == "_record" else self._delayed
            setattr(DistGroup, name, make(getattr(DistGroup, name)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, own in self._own.items():
            if own is None:  # inherited from `Group`
                delattr(DistGroup, name)
            else:
                setattr(DistGroup, name, own)

    def sleep_until(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _noting(self, record: Callable[..., None]) -> Callable[..., None]:
        """`Group._record`, which notes the bytes for the method that runs."""

        @wraps(record)
        def noting(group: Group, kind: PrimitiveKind, size_bytes: int) -> None:
            if self._recorded:
                self._recorded[-1].append(size_bytes)
            record(group, kind, size_bytes)

        return noting

    def _delayed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def delayed(group: Group, *args: Any, **kwargs: Any) -> Any:
            issued_s = self._clock()
            self._recorded.append([])
            try:
                result = method(group, *args, **kwargs)
            finally:
                sizes_bytes = self._recorded.pop()
            if not sizes_bytes:
                return result
            end_s = self._end_s(group.ranks, issued_s, sizes_bytes)
            if not isinstance(result, Tensor) and hasattr(result, "wait"):
                return DelayedHandle(result, end_s, self)
            self.sleep_until(end_s)
            return result

        return delayed

    def _end_s(self, ranks: tuple[int, ...], issued_s: float, sizes_bytes: list[int]) -> float:
        """When calls of these bytes end that are issued at `issued_s`."""
        delay_s = sum(self.alpha_s + n * self.beta_s_per_byte for n in sizes_bytes)
        end_s = max(issued_s, self._ends_s.get(ranks, issued_s)) + delay_s
        self._ends_s[ranks] = end_s
        self.n_calls += len(sizes_bytes)
        self.size_bytes += sum(sizes_bytes)
        self.delay_s += delay_s
        return end_s


def _public_methods() -> list[str]:
    """Every method that a caller of `DistGroup` has, inherited ones included."""
    return [
        name
        for name in dir(DistGroup)
        if not name.startswith("_") and callable(getattr(DistGroup, name))
    ]
