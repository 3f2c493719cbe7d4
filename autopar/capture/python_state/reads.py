"""Records which attributes of a model's modules a trace reads, and which it leaves changed.

While a trace runs, reads and writes of attributes of any `nn.Module` pass through the functions
below. Those of the traced copy, and of the user's own model (from a closure), are recorded under
the module's path. `torch.export` puts attributes of modules back after a trace, so a change is seen
only by its writes, or in a container that the trace was handed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.capture.python_state.snapshot import (
    ABSENT,
    INTERNAL,
    Snapshot,
    equal,
    is_plain,
    snapshot,
)

_lock = threading.Lock()
_active: dict[int, tuple[Recorder, str]] = {}  # id of a module -> who records it, its path


@dataclass
class _First:
    """An attribute's value at the first read or write, what was in it, and what was last written.

    is_set    it was written before it was read, so that the trace does not depend on the value
    """

    module: nn.Module
    path: str
    value: object
    taken: Snapshot
    written: tuple[object, ...] = ()
    is_set: bool = False


@dataclass
class Recorder:
    """`reads` of one trace: (module path, attribute), in order."""

    reads: dict[tuple[str, str], None] = field(default_factory=dict)
    _first: dict[tuple[int, str], _First] = field(default_factory=dict)

    def read(self, module: nn.Module, path: str, name: str, value: object) -> None:
        key = id(module), name
        if key not in self._first:
            self.reads[path, name] = None
            taken = snapshot(name, value if is_plain(value) else None)
            self._first[key] = _First(module, path, value, taken)

    def write(self, module: nn.Module, path: str, name: str, value: object) -> None:
        first = self._first.get((id(module), name))
        if first is None:
            held = vars(module).get(name, ABSENT)
            first = _First(module, path, held, snapshot(name, None), is_set=True)
            self._first[id(module), name] = first
        first.written = (value,)

    def changed(self) -> Iterator[tuple[str, str]]:
        """(module path, attribute) of what the trace read and left changed."""
        for (_, name), first in self._first.items():
            last = first.written[0] if first.written else first.value
            if first.is_set or not is_plain(first.value) or isinstance(last, Tensor):
                continue
            before = first.taken.values
            if is_plain(last) and all(
                equal(before, snapshot(name, value).values) for value in (first.value, last)
            ):
                continue
            yield first.path, name

    def keep(self) -> None:
        """Put back what the trace wrote, which `torch.export` has undone."""
        for (_, name), first in self._first.items():
            if not _is_registered(first.module, name) and name != "training":
                if first.written:
                    vars(first.module)[name] = first.written[0]
                elif name in vars(first.module) and is_plain(first.value):
                    vars(first.module)[name] = first.value

    def restore(self) -> None:
        """Undo what the trace wrote."""
        for (_, name), first in self._first.items():
            first.taken.restore()
            if first.written and first.value is ABSENT:
                vars(first.module).pop(name, None)
            elif first.written and name in vars(first.module):
                vars(first.module)[name] = first.value


@contextmanager
def recorded(*models: nn.Module) -> Iterator[Recorder]:
    """Record the modules of `models`, which have the same paths."""
    recorder = Recorder()
    paths = {id(m): (recorder, path) for model in models for path, m in model.named_modules()}
    with _lock:
        if not _active:
            nn.Module.__getattribute__ = _getattribute  # type: ignore[method-assign,assignment]
            nn.Module.__setattr__ = _setattr  # type: ignore[method-assign]
        _active.update(paths)
    try:
        yield recorder
    finally:
        with _lock:
            for key in paths:
                _active.pop(key, None)
            if not _active:
                del nn.Module.__getattribute__
                nn.Module.__setattr__ = _plain_setattr  # type: ignore[method-assign]


_plain_setattr = nn.Module.__setattr__


def _getattribute(self: nn.Module, name: str) -> Any:
    watched = _active.get(id(self))
    if watched is None or name in INTERNAL or name.startswith("__"):
        return object.__getattribute__(self, name)
    try:
        value = object.__getattribute__(self, name)
    except AttributeError:
        if not _is_registered(self, name):
            watched[0].read(self, watched[1], name, ABSENT)
        raise
    watched[0].read(self, watched[1], name, value)
    return value


def _setattr(self: nn.Module, name: str, value: Any) -> None:
    watched = _active.get(id(self))
    if watched is not None and not _is_registered(self, name):
        watched[0].write(self, watched[1], name, value)
    _plain_setattr(self, name, value)


def _is_registered(module: nn.Module, name: str) -> bool:
    held = object.__getattribute__(module, "__dict__")
    return any(name in held.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
