"""Python values as a flat list: what is in a value, where each part is read, and what it was.

A *value* here is a scalar (number, string, None, dtype, device, enum), a container of values, or an
object with attributes. `Snapshot` records under a name

    of a scalar       the scalar
    of a container    its length; of a set, its members; of a list or dict that is long or deep,
                      its `Contents`
    of an array       its bytes, or a checksum of them
    of a tensor       which tensor it is, how often it was written to, and a sum of its bits
    of an object      its attributes, to a bounded depth

and where each part is, so that `is_same` compares them in a few microseconds. Every comparison is
by identity. So a new object with an equal value needs a new snapshot, which finds equal `values`.

Not watched is what objects deeper than `MAX_DEPTH` hold, and what changes inside of an object in a
long list or dict. Once the arrays of a snapshot are above `MAX_DIGEST_BYTES`, or its long lists and
dicts above `MAX_CONTENTS`, of the others it is watched only which object they are. The check of
that much takes some 10 ms in each step; a model without such values pays nothing.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.capture.python_state.code import is_library_module

MAX_DEPTH = 4  # of attributes of objects
MAX_NESTED = 8  # of items of containers
MAX_ITEMS = 256  # of longer containers only the `Contents` are watched
MAX_CONTENTS = 100_000  # items of one snapshot, beside containers up to `MAX_ITEMS`
MAX_VALUES = 20_000  # of one snapshot; a closure over a data set has more than anyone reads
MAX_ARRAY_BYTES = 4096
MAX_DIGEST_BYTES = 4 * 2**20  # of one snapshot, beside smaller arrays

Scalar = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), Enum, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.generic, np.dtype,
)  # fmt: skip
_PLAIN = (int, float, complex, str, bytes, type(None), Enum, np.generic)
Functions = (FunctionType, MethodType, BuiltinFunctionType, type, type(lru_cache(lambda: None)))
# What torch itself keeps in a module. `hooks.py` records hooks, parameters are no constants.
INTERNAL = ({*vars(nn.Module()), *vars(nn.Module)} - {"training"}) | {
    "_is_full_backward_hook", "_is_hf_initialized", "_initialize_hook", "_load_hook",
}  # fmt: skip
_STATES: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (itertools.count, repr),
    (random.Random, random.Random.getstate),
    (np.random.Generator, lambda g: repr(g.bit_generator.state)),
    (np.random.RandomState, lambda g: repr(g.get_state())),
    (Iterator, lambda i: _position(i)),
)


def _position(iterator: Any) -> object:
    """How far an iterator is; those that do not tell are always at -1."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None:
        return frame.f_lasti, tuple(map(id, frame.f_locals.values()))
    return operator.length_hint(iterator, -1)


class Absent(Enum):
    """The value of an attribute that was asked for and is not there."""

    ABSENT = "no such attribute"

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent.ABSENT


Version = tuple[int, int]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Held:
    """Which tensor a name held, and its `version_of`."""

    tensor: Tensor
    version: Version

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Held) and other.tensor is self.tensor
        return same and isinstance(other, Held) and other.version == self.version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))

    def __repr__(self) -> str:
        return f"a tensor of shape {tuple(self.tensor.shape)}, written to {self.version[0]} times"


@dataclass(frozen=True, eq=False)
class Which:
    """An object that counts by which it is."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Which) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"a {type(self.held).__name__}"


@dataclass(frozen=True, eq=False)
class Contents:
    """The keys and items of a long list or dict; items that are no scalars count by identity."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents) or len(other.items) != len(self.items):
            return False
        if not all(map(operator.is_, self.keys, other.keys)) and self.keys != other.keys:
            return False
        if all(map(operator.is_, self.items, other.items)):
            return True
        return (
            self._is_plain
            and self.items == other.items
            and all(map(operator.is_, map(type, self.items), map(type, other.items)))
        )

    def __hash__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return repr(self.items) if self._is_plain else f"{len(self.items)} items"

    @cached_property
    def _is_plain(self) -> bool:
        return all(issubclass(kind, _PLAIN) for kind in {*map(type, self.items)})


def contents_of(value: Any) -> Contents:
    """What is in a list, tuple, deque or dict."""
    is_dict = isinstance(value, dict)
    return Contents(tuple(value) if is_dict else (), tuple(value.values() if is_dict else value))


def digest_of(array: np.ndarray[Any, Any]) -> tuple[object, ...]:
    """Shape, dtype and a checksum of an array."""
    return array.shape, array.dtype.str, zlib.crc32(array.tobytes())


def version_of(tensor: Tensor) -> Version:
    """How often a tensor was written to, and a sum of its bits.

    torch counts no writes through `.data` and none in inference mode, which change the sum. On GPUs
    the sum is left out, since the host would wait for it before each step.
    """
    count = 0 if tensor.is_inference() else tensor._version
    bits = _BITS.get(tensor.element_size())
    has_memory = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
    if bits is None or not has_memory or tensor.layout is not torch.strided:
        return count, 0
    return count, int(tensor.detach().view(bits).sum(dtype=torch.int64))


@dataclass
class Snapshot:
    """Values by name, and where they were read.

    items       (mapping or list, key, what was there)
    attributes  (object, attribute, what was there); of a closure cell, its contents
    inherited   (object, attribute) of those that its class, or a base, keeps
    missing     (mapping, key) of what was not there
    measures    (function, object, result): lengths, members of sets, versions of tensors
    contents    (container, a copy)
    """

    versions: bool = True
    values: dict[str, object] = field(default_factory=dict)
    items: list[tuple[Any, Any, Any]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    inherited: list[tuple[Any, str]] = field(default_factory=list)
    missing: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    measures: list[tuple[Callable[[Any], object], Any, object]] = field(default_factory=list)
    contents: list[tuple[Any, Any]] = field(default_factory=list)
    _seen: dict[int, object] = field(default_factory=dict)
    _n_contents: int = 0
    _n_bytes: int = 0

    def item(self, holder: Any, key: Any, text: str, place: str, depth: int = 0) -> None:
        """Record `holder[key]`."""
        value = holder[key]
        self.items.append((holder, key, value))
        self.value(value, text, place, depth)

    def attribute(self, holder: Any, name: str, text: str, place: str, depth: int = 0) -> None:
        """Record an attribute that is not in the object's own dictionary."""
        value = getattr(holder, name, ABSENT)
        if isinstance(value, MethodType) or getattr(holder, name, ABSENT) is not value:
            return  # made anew at each read
        self.attributes.append((holder, name, value))
        kind = _class_that_keeps(holder, name)
        if kind is not None:
            self.attributes.append((kind, name, value))
            self.inherited.append((holder, name))
        self.value(value, text, place, depth)

    def absent(self, holder: dict[str, Any], key: str, text: str, place: str) -> None:
        """Record that a name is not there; `hasattr` asked for it."""
        self.missing.append((holder, key))
        self._put(f"`{text}` {place}", ABSENT)

    def cell(self, cell: CellType, text: str, place: str) -> None:
        """Record the contents of a closure cell, if it has any."""
        try:
            value = cell.cell_contents
        except ValueError:
            return
        self.attributes.append((cell, "cell_contents", value))
        self.value(value, text, place)

    def measure(self, name: str, function: Callable[[Any], object], of: Any) -> None:
        """Record what `function` says of an object."""
        result = function(of)
        self.measures.append((function, of, result))
        self._put(name, result)

    def value(self, value: Any, text: str, place: str, depth: int = 0) -> None:
        """Record what is in `value`; `text` and `place` are its name."""
        name = f"`{text}` {place}"
        if isinstance(value, Scalar):
            self._put(name, value)
        elif isinstance(value, Tensor):
            self.tensor(value, name)
        elif id(value) in self._seen or len(self.values) > MAX_VALUES:
            return
        else:
            self._seen[id(value)] = value
            self._inside(value, text, place, depth)

    def tensor(self, value: Tensor, name: str) -> None:
        version = version_of(value) if self.versions else (0, 0)
        self._put(name, Held(value, version))
        if self.versions:
            self.measures.append((version_of, value, version))

    def contained(self, name: str, value: Any) -> None:
        """Record the contents of a list or dict; past `MAX_CONTENTS`, only which one it is."""
        is_known = isinstance(value, (list, tuple, deque, dict))
        if is_known and self._n_contents + len(value) <= MAX_CONTENTS:
            self._n_contents += len(value)
            self.measure(name, contents_of, value)
        else:
            self._put(name, Which(value))

    def array(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Record the bytes of an array; past `MAX_DIGEST_BYTES`, only which one it is."""
        if value.nbytes <= MAX_ARRAY_BYTES:
            self.measure(name, np.ndarray.tobytes, value)
        elif self._n_bytes + value.nbytes <= MAX_DIGEST_BYTES:
            self._n_bytes += value.nbytes
            self.measure(f"contents of {name}", digest_of, value)
        else:
            self._put(f"contents of {name}", Which(value))

    def _inside(self, value: Any, text: str, place: str, depth: int) -> None:
        name = f"`{text}` {place}"
        if isinstance(value, (*Functions, partial)):
            self.function(value, text, place)
        elif isinstance(value, nn.Module):
            self.module(value, text, place, depth)
        elif isinstance(value, ModuleType):
            return
        elif isinstance(value, (list, tuple, deque)):
            self.measure(f"length of {name}", len, value)
            self._keep(value)
            if len(value) <= MAX_ITEMS and depth < MAX_NESTED:
                for index in range(len(value)):
                    self.item(value, index, f"{text}[{index}]", place, depth + 1)
            else:
                self.contained(f"contents of {name}", value)
        elif isinstance(value, (set, frozenset)):
            self.measure(name, frozenset, value)
            self._keep(value)
        elif isinstance(value, np.ndarray):
            self.array(name, value)
        elif any(isinstance(value, kind) for kind, _ in _STATES):
            if not self.versions:  # compared around a trace only: others draw from it, too
                read = next(read for kind, read in _STATES if isinstance(value, kind))
                self._put(f"state of {name}", read(value))
        else:
            self._parts(value, text, place, depth)

    def _parts(self, value: Any, text: str, place: str, depth: int) -> None:
        """The items of a mapping and the attributes of an object."""
        if isinstance(value, Mapping):
            self.measure(f"length of `{text}` {place}", len, value)
            self._keep(value)
            if len(value) <= MAX_ITEMS and depth < MAX_NESTED:
                for key in [*value]:
                    self.item(value, key, f"{text}[{key!r}]", place, depth + 1)
            else:
                self.contained(f"contents of `{text}` {place}", value)
        if not _has_own_parts(value) or depth >= MAX_DEPTH:
            return
        self.instance(value, text, place)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            for key in [*held]:
                self.item(held, key, f"{text}.{key}", place, depth + 1)
        for key in slot_names(value):
            if hasattr(value, key):
                self.attribute(value, key, f"{text}.{key}", place, depth + 1)

    def function(self, function: Any, text: str, place: str) -> None:
        """A function or class: which one it is."""
        self._put(f"`{text}` {place}", described(function))

    def module(self, module: nn.Module, text: str, place: str, depth: int) -> None:
        """A module that is no part of the model: a loss, a teacher. Overridden where walked."""

    def instance(self, value: Any, text: str, place: str) -> None:
        """An object with attributes. Overridden where its methods are walked."""

    def _keep(self, container: Any) -> None:
        if isinstance(container, (list, dict, set, deque)) and len(container) <= MAX_ITEMS:
            self.contents.append((container, container.copy()))

    def _put(self, name: str, value: object) -> None:
        unique = name
        for n in itertools.count(2):
            if unique not in self.values:
                break
            unique = f"{name} ({n})"
        self.values[unique] = value

    def is_unchanged(self) -> bool:
        """Is the same at every place that was read?"""
        try:
            return (
                all(holder[key] is value for holder, key, value in self.items)
                and all(getattr(of, name, ABSENT) is value for of, name, value in self.attributes)
                and all(
                    len(now) == len(then) and all(map(operator.is_, now, then))
                    for now, then in self.contents
                )
                and all(function(of) == result for function, of, result in self.measures)
                and not any(key in holder for holder, key in self.missing)
            )
        except (KeyError, IndexError, ValueError):
            return False

    def restore(self) -> None:
        """Put everything back where it was read, so that a trace leaves no mark."""
        for container, copy in self.contents:
            if len(container) == len(copy) and all(map(operator.is_, container, copy)):
                continue
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(copy)
            else:
                container.extend(copy)
        for holder, key, value in self.items:
            if isinstance(holder, dict):
                if holder.get(key, ABSENT) is not value:
                    holder[key] = value
            elif isinstance(holder, list) and holder[key] is not value:
                holder[key] = value
        for holder, name in self.inherited:
            if name in getattr(holder, "__dict__", ()):
                delattr(holder, name)
        for holder, name, value in self.attributes:
            if value is not ABSENT and getattr(holder, name, ABSENT) is not value:
                setattr(holder, name, value)


def _class_that_keeps(holder: Any, name: str) -> type | None:
    """The class from which an object or class has an attribute; None if it keeps that itself."""
    if name in getattr(holder, "__dict__", ()):
        return None
    for kind in (holder if isinstance(holder, type) else type(holder)).__mro__:
        if name in vars(kind):
            return None if hasattr(type(vars(kind)[name]), "__set__") else kind
    return None


def _has_own_parts(value: Any) -> bool:
    """Objects of users and of installed packages (a config) do; of torch and Python, namespaces."""
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return True
    module = type(value).__module__ or ""
    root = module.partition(".")[0]
    return root not in ("torch", "numpy", "builtins", "autopar") and not (
        root in _standard_library() and is_library_module(module)
    )


def _standard_library() -> frozenset[str]:
    import sys

    return sys.stdlib_module_names


def described(function: Any) -> object:
    """What tells functions apart: the code of a Python function, else its name."""
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    if code is not None:
        return code
    return getattr(inner, "__module__", ""), getattr(inner, "__qualname__", type(inner))


def is_plain(value: object) -> bool:
    """Can the trace read a Python value from this? A function or class has none of its own."""
    return not isinstance(value, (*Functions, nn.Module, Tensor))


def slot_names(value: object) -> Iterator[str]:
    """The attributes that an object keeps in slots."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield name


def snapshot(text: str, value: object, place: str = "") -> Snapshot:
    """What is in a value; tensors count by which they are."""
    taken = Snapshot(versions=False)
    taken.value(value, text, place)
    return taken


def equal(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Are all values of two snapshots equal?"""
    return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)


def same(one: object, other: object) -> bool:
    """Are two recorded values equal, in type too? NaN equals itself, 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    return bool(one == other)
