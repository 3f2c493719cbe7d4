"""What travels between a caller and its workers: functions, arguments and results, pickled.

Functions and classes that workers cannot import travel by value (cloudpickle). Tensors travel as
plain copies on the CPU, never as shared memory, so no file descriptor outlives a call.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from autopar.errors import LaunchError


def request_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """(fn, args) pickled; the function is pickled alone first, for a clear message."""
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        _sent(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"cannot send {name} to worker processes: {error}",
            hint="it uses something that cannot be pickled; make that in the function",
        ) from error
    try:
        return _sent((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"cannot send the arguments of {name} to worker processes: {error}",
            hint="pass plain data and tensors; build models and loaders in the function",
        ) from error


def _sent(value: Any) -> bytes:
    """Pickled by reference to what workers can import; else functions and classes by value."""
    if _main_file() is not None or "__main__" not in sys.modules:
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            return dumps(value)
    return dumps(value, _by_value())


def _main_file() -> str | None:
    """What workers import as `__main__`; None in notebooks, `python -c` and scripts from stdin."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is not None:
        return path  # python -m
    return path if path is not None and os.path.exists(path) else None


@contextmanager
def importable_main() -> Iterator[None]:
    """Multiprocessing would import a `__file__` that is only a name, such as `<stdin>`."""
    main = sys.modules["__main__"]
    if _main_file() is not None or not hasattr(main, "__file__"):
        yield
        return
    name = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


class _Pickler(pickle.Pickler):
    """Pickles tensors as detached CPU copies of only their elements."""

    def reducer_override(self, obj: Any) -> Any:
        return _plain_tensor(obj)


@cache
def _by_value() -> type[pickle.Pickler]:
    """The same, and functions and classes that cannot be imported by value."""
    try:
        from cloudpickle import Pickler
    except ImportError as error:
        raise LaunchError(
            "what a notebook or a closure defines travels to workers by cloudpickle, which is "
            "not installed",
            hint="pip install cloudpickle, or define the function at the top level of a module",
        ) from error

    class ByValue(Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = _plain_tensor(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ByValue


def _plain_tensor(obj: Any) -> Any:
    # Other subclasses, and tensors without plain storage, pickle themselves.
    strided = isinstance(obj, Tensor) and obj.layout == torch.strided and not obj.is_meta
    if strided and type(obj) in (Tensor, torch.nn.Parameter):
        plain = obj.detach().cpu()
        if plain.untyped_storage().nbytes() != plain.nbytes:
            plain = plain.clone(memory_format=torch.contiguous_format)
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return NotImplemented


def answer_of(value: Any) -> bytes:
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        return dumps(value, _Pickler)
    return dumps(value, _by_value())


def dumps(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    buffer = BytesIO()
    pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
