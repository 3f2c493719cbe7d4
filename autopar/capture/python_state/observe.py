"""Which Python values a trace of the user's code depends on, found without running it.

Attributes of modules are those that the trace read (`reads.py`). Everything else is found by a walk
over code, which starts at the loss and at the `forward` methods and hooks of the model's modules:

    function     its globals by chain (`code.py`), closure cells and defaults
    class        its methods whose names the walked code mentions, and its own attributes
    object       its attributes, its `__call__`, and methods as of a class
    module       of the model: nothing but its code; another one (a loss, a teacher): as an object

Library code is not walked: its globals are not the user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from autopar.capture.python_state.code import Chain, is_library, is_library_module, reads_of
from autopar.capture.python_state.hooks import forward_hooks, hook_records
from autopar.capture.python_state.snapshot import (
    ABSENT,
    INTERNAL,
    Functions,
    Snapshot,
    is_plain,
)

_CALLED = frozenset({"__call__", "forward"})
_REQUIRES_GRAD = attrgetter("requires_grad")
_SHAPE = attrgetter("shape")


@dataclass
class Observation(Snapshot):
    """A snapshot of all that the trace of one model and loss depends on.

    own      the modules of the model by id
    places   code that was walked, as `file:line` by the name of a global that it reads
    """

    own: dict[int, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    _instances: list[tuple[Any, str, str]] = field(default_factory=list)
    _classes: dict[type, None] = field(default_factory=dict)
    _names: set[str] = field(default_factory=lambda: set(_CALLED))
    _walked: dict[tuple[int, ...], object] = field(default_factory=dict)

    @staticmethod
    def around_trace(model: nn.Module, loss_fn: Any) -> Observation:
        """What a trace could change: all but attributes of modules, which it records itself."""
        return observe(model, loss_fn, versions=False)

    def place_of(self, name: str) -> str | None:
        """`file:line` of code that reads the global of this name."""
        return self.places.get(re.split(r"[.\[`]", name.partition("`")[2])[0])

    def function(self, function: Any, text: str, place: str) -> None:
        """Which function it is, and what its code reads."""
        super().function(function, text, place)
        self.walk(function)

    def walk(self, function: Any) -> None:
        """Record what the code of a function, method, partial or class reads."""
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.walk(wrapped)
        if isinstance(function, partial):
            self.walk(function.func)
            place = f"in the partial of {_name_of(function.func)}"
            self.value(function.args, "args", place)
            self.value(function.keywords, "keywords", place)
        elif isinstance(function, MethodType):
            self.walk(function.__func__)
            self.value(function.__self__, _name_of(function.__self__), "of a bound method")
        elif isinstance(function, FunctionType):
            self._function(function)
        elif isinstance(function, type) and not is_library_module(function.__module__):
            self._class(function)

    def _function(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        key = id(function.__code__), id(function.__globals__), *map(id, cells)
        if key in self._walked:
            return
        self._walked[key] = function
        code, known = function.__code__, not is_library(function.__code__.co_filename)
        found = reads_of(code)
        where = f"in `{function.__qualname__}`"
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if not known:
                self._callable_of(cell)
            elif name != "__class__":  # of `super()`
                self.cell(cell, name, where)
        if not known:
            return
        self._names |= found.attributes
        if function.__defaults__:
            self.value(function.__defaults__, "defaults", where)
        if function.__kwdefaults__:
            self.value(function.__kwdefaults__, "defaults", where)
        for chain in found.globals:
            if chain[0] in function.__globals__:
                place = f"{code.co_filename}:{code.co_firstlineno}"
                self.places.setdefault(chain[0], place)
                self._chain(chain, function.__globals__)

    def _callable_of(self, cell: Any) -> None:
        """What a library's wrapper wraps: `torch.no_grad()(f)` has f in a cell."""
        try:
            inner = cell.cell_contents
        except ValueError:
            return
        if isinstance(inner, (FunctionType, MethodType, partial)):
            self.walk(inner)

    def _chain(self, chain: Chain, variables: dict[str, Any]) -> None:
        """Record the value of `a.b.c`; modules and classes lead on, other values are read whole."""
        file = variables.get("__file__")
        place = f"of {Path(file).name if file else variables.get('__name__')}"
        holder: Any = variables
        for depth, key in enumerate(chain):
            text = ".".join(chain[: depth + 1])
            value = holder.get(key, ABSENT)
            if isinstance(value, ModuleType):
                if is_library_module(value.__name__):
                    return
                holder = vars(value)
                continue
            if isinstance(value, type) and depth + 1 < len(chain):
                if is_library_module(value.__module__) or issubclass(value, Enum):
                    return
                self._class(value)
                self.attribute(value, chain[depth + 1], ".".join(chain[: depth + 2]), place)
            elif value is not ABSENT and not _is_library_function(value):
                self.item(holder, key, text, place)
            return

    def _class(self, kind: type) -> None:
        self._classes[kind] = None

    def instance(self, value: Any, text: str, place: str) -> None:
        """The methods of an object may run, if the code names them."""
        self._class(type(value))
        self._instances.append((value, text, place))

    def module(self, module: nn.Module, text: str, place: str, depth: int) -> None:
        """A module of the model is known by its reads; of another, all is recorded."""
        if id(module) in self.own or type(module).__module__.startswith("autopar."):
            return
        self.instance(module, text, place)
        held = vars(module)
        for key in held.keys() - INTERNAL:
            self.item(held, key, f"{text}.{key}", place, depth + 1)
        for kind in ("_parameters", "_buffers"):
            for key, tensor in held[kind].items():
                if tensor is not None:
                    self.tensor(tensor, f"`{text}.{key}` {place}")
        for key, child in held["_modules"].items():
            if child is not None:
                self.value(child, f"{text}.{key}", place, depth)

    def close(self) -> None:
        """Walk the methods that walked code names, until there are no more."""
        done = 0
        while done != len(self._walked) + len(self._names) + len(self._classes):
            done = len(self._walked) + len(self._names) + len(self._classes)
            for kind in [*self._classes]:
                for base in kind.__mro__:
                    if is_library_module(base.__module__):
                        continue
                    for name in sorted(self._names & vars(base).keys()):
                        self._method(vars(base)[name])
        for value, text, place in self._instances:
            self._class_values(value, text, place)

    def _class_values(self, value: Any, text: str, place: str) -> None:
        """Attributes that an object has from its class, and that walked code names."""
        known = {*getattr(value, "__dict__", ())}
        for base in type(value).__mro__:
            if is_library_module(base.__module__):
                continue
            for name in sorted(self._names & (vars(base).keys() - known)):
                known.add(name)
                if not hasattr(type(vars(base)[name]), "__get__"):  # no method, no property
                    self.attribute(value, name, f"{text}.{name}", place)

    def _method(self, value: Any) -> None:
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", getattr(value, "func", value))
        if isinstance(value, FunctionType):
            self.walk(value)


def _is_library_function(value: Any) -> bool:
    return not is_plain(value) and is_library_module(getattr(value, "__module__", None) or "")


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__name__


def observe(
    model: nn.Module,
    loss_fn: Any,
    reads: Iterable[tuple[str, str]] = (),
    modes: Mapping[str, bool] | None = None,
    versions: bool = True,
    buffers: Iterable[str] = (),
) -> Observation:
    """Record what the model's code and its loss depend on, with the attributes that were read.

    `modes`: the training mode of each module at the capture; None if the trace set it itself.
    `buffers`: the model's buffers that the graph holds as constants.
    """
    named = dict(model.named_modules())
    taken = Observation(versions, own={id(m): path for path, m in named.items()})
    for module in named.values():
        taken._class(type(module))
        for key, value in vars(module).items():
            if key not in INTERNAL and isinstance(value, (*Functions, partial)):
                taken.walk(value)
        for hook in forward_hooks(module):
            taken.walk(hook)
    if loss_fn is not None:
        taken.value(loss_fn, _name_of(loss_fn), "given as loss_fn")
    for path, name in reads:
        if path in named and name != "training":
            _attribute(taken, named[path], path, name)
    if modes:
        _modes(taken, named, [path for path, name in reads if name == "training"], modes)
    taken.close()
    _structure(taken, named)
    _buffers(taken, named, buffers)
    hook_records(taken, model)
    return taken


def _attribute(taken: Observation, module: nn.Module, path: str, name: str) -> None:
    """An attribute of one of the model's modules."""
    held = vars(module)
    if any(name in held[kind] for kind in ("_parameters", "_buffers", "_modules")):
        return
    if name in held:
        taken.item(held, name, name, of_module(path))
        return
    value = getattr(type(module), name, ABSENT)
    if value is ABSENT:
        taken.absent(held, name, name, of_module(path))
    elif not hasattr(type(value), "__get__"):  # no method, no property
        taken.attribute(module, name, name, of_module(path))


def _modes(
    taken: Observation,
    named: Mapping[str, nn.Module],
    paths: Iterable[str],
    modes: Mapping[str, bool],
) -> None:
    """Training modes of modules, as long as the model's own mode is that of the capture.

    `model.eval()` changes all of them. The mode of a parallel module is its own, so then they stay
    what they were.
    """
    taken.items.append((vars(named[""]), "training", named[""].training))
    follows = named[""].training == modes[""]
    for path in paths:
        if path not in named:
            continue
        if follows:
            taken.item(vars(named[path]), "training", "training", of_module(path))
        else:
            taken.values[f"`training` {of_module(path)}"] = modes[path]


def _structure(taken: Observation, named: Mapping[str, nn.Module]) -> None:
    """Which modules there are, and their parameters: which are one, which learn, how large."""
    for module in named.values():
        children = vars(module)["_modules"]
        taken.items += [(children, name, child) for name, child in children.items()]
        taken.measures.append((len, children, len(children)))
    names: dict[int, list[str]] = {}
    for path, module in named.items():
        taken.values[f"class {of_module(path)}"] = type(module)
        for name, parameter in vars(module)["_parameters"].items():
            taken.items.append((vars(module)["_parameters"], name, parameter))
            if parameter is not None:
                text = f"{path}.{name}".removeprefix(".")
                names.setdefault(id(parameter), []).append(text)
                taken.measure(f"`requires_grad` of `{text}`", _REQUIRES_GRAD, parameter)
                taken.measure(f"`shape` of `{text}`", _SHAPE, parameter)
    taken.values["tied parameters"] = tuple(tuple(n) for n in names.values() if len(n) > 1)


def _buffers(taken: Observation, named: Mapping[str, nn.Module], names: Iterable[str]) -> None:
    """Which tensors these buffers are, and how often each was written to."""
    for full in names:
        path, _, name = full.rpartition(".")
        held = vars(named[path])["_buffers"] if path in named else {}
        if name in held:
            taken.item(held, name, full, "of the model's buffers")


def of_module(path: str) -> str:
    return f"of `{path}`" if path else "of the model"
