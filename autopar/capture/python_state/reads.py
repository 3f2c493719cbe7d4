"""Records which attributes of a model's modules a trace reads, and which it leaves changed.

While a trace runs, reads and writes of attributes of any `nn.Module` pass through the functions
below. Those of the traced copy, and of the user's own model (from a closure), are recorded under
the module's path. `torch.export` puts attributes of modules back after a trace, so a change is seen
only by its writes, or in a container that the trace was handed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.python_state.snapshot import (
    ABSENT,
    INTERNAL,
    Scalar,
    Snapshot,
    equal,
    is_plain,
    snapshot,
)

_TORCH = str(Path(torch.__file__).parent)
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
class Window:
    """All reads within a part of a trace.

    reads     (module, attribute), in order
    is_whole  a module's `__dict__` was read, so all attributes may have been
    """

    reads: dict[tuple[nn.Module, str], None] = field(default_factory=dict)
    is_whole: bool = False


@dataclass
class Recorder:
    """`reads` of one trace: (module path, attribute), in order.

    has_written   did forward set an attribute so far?
    window        what else records reads
    """

    reads: dict[tuple[str, str], None] = field(default_factory=dict)
    has_written: bool = False
    window: Window | None = None
    _first: dict[tuple[int, str], _First] = field(default_factory=dict)

    def read(self, module: nn.Module, path: str, name: str, value: object) -> None:
        key = id(module), name
        if self.window is not None:
            self.window.reads[module, name] = None
        if key not in self._first:
            self.reads[path, name] = None
            taken = snapshot(name, value if is_plain(value) else None)
            self._first[key] = _First(module, path, value, taken)

    def write(self, module: nn.Module, path: str, name: str, value: object) -> None:
        self.has_written = True
        first = self._first.get((id(module), name))
        if first is None:
            held = vars(module).get(name, ABSENT)
            first = _First(module, path, held, snapshot(name, None), is_set=True)
            self._first[id(module), name] = first
        first.written = (value,)

    def is_unchanged(self, module: nn.Module, name: str) -> bool:
        """Is in an attribute what was in it as it was first read?"""
        first = self._first[id(module), name]
        value = value_of(module, name)
        now = snapshot(name, value if is_plain(value) else None)
        made_anew = isinstance(value, (*Scalar, MethodType)) and value == first.value
        return (value is first.value or made_anew) and equal(first.taken.values, now.values)

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


def recorder_of(module: nn.Module) -> Recorder | None:
    """Who records the reads of a module, if anybody does."""
    return _active[id(module)][0] if id(module) in _active else None


def value_of(module: nn.Module, name: str) -> object:
    """An attribute, without a record."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return ABSENT


_plain_setattr = nn.Module.__setattr__


def _getattribute(self: nn.Module, name: str) -> Any:
    watched = _active.get(id(self))
    if watched is None or name in INTERNAL or name.startswith("__"):
        if name == "__dict__" and watched is not None and watched[0].window is not None:
            reader = sys._getframe(1).f_code.co_filename
            watched[0].window.is_whole |= not reader.startswith(_TORCH)
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
    elif watched is not None and watched[0].window is not None:
        watched[0].has_written = True  # a buffer
    _plain_setattr(self, name, value)


def _is_registered(module: nn.Module, name: str) -> bool:
    held = object.__getattribute__(module, "__dict__")
    return any(name in held.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
