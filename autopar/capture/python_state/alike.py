"""Do equal modules hold equal values? Then a trace of one of them reads what the others hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from autopar.capture.python_state.snapshot import ABSENT, Scalar, same, slot_names

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made


class Alike:
    """Compares values that two modules hold.

    modules   id of a module within the first -> the module at the same place within the second

    What is not known to be equal counts as unequal: other tensors, other modules, objects with a
    state that Python does not see.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = modules
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # kept, so that ids stay theirs

    def __call__(self, one: Any, other: Any) -> bool:
        """Is `other` to the second module what `one` is to the first?"""
        if id(one) in self._modules:
            return self._modules[id(one)] is other
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, Scalar):
            return same(one, other)
        if (id(one), id(other)) in self._seen:
            return True
        self._seen[id(one), id(other)] = one, other
        return self._inside(one, other)

    def _inside(self, one: Any, other: Any) -> bool:
        if isinstance(one, (Tensor, nn.Module)):
            return False
        if isinstance(one, MethodType):
            return one.__func__ is other.__func__ and self(one.__self__, other.__self__)
        if isinstance(one, FunctionType):
            is_code = one.__code__ is other.__code__ and one.__globals__ is other.__globals__
            return is_code and self._all(_parts(one), _parts(other))
        if isinstance(one, partial):
            return self._all(
                (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
            )
        if isinstance(one, CellType):
            return self(*(getattr(cell, "cell_contents", ABSENT) for cell in (one, other)))
        if type(one) in (list, tuple, deque):
            return self._all(one, other)
        if type(one) is dict:
            return self._all((*one, *one.values()), (*other, *other.values()))
        if type(one) in (set, frozenset):
            return bool(one == other) and all(isinstance(value, Scalar) for value in one)
        if type(one) is np.ndarray:
            is_layout = one.dtype == other.dtype and one.shape == other.shape
            return is_layout and not one.dtype.hasobject and one.tobytes() == other.tobytes()
        if all(kind is object or kind.__flags__ & _HEAP_TYPE for kind in type(one).__mro__):
            return self._all(_attributes(one), _attributes(other))
        return False

    def _all(self, some: Any, others: Any) -> bool:
        return len(some) == len(others) and all(map(self, some, others))


def _parts(function: FunctionType) -> tuple[Any, ...]:
    return (
        function.__defaults__, function.__kwdefaults__, function.__closure__, vars(function),
    )  # fmt: skip


def _attributes(value: Any) -> tuple[Any, ...]:
    slots = (getattr(value, name, ABSENT) for name in slot_names(value))
    return getattr(value, "__dict__", None), *slots
