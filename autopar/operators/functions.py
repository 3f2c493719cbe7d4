"""Operators made of `torch.autograd.Function` classes, so that their own backward is kept.

    F.apply(x, w, 2.0)    is    torch.ops.autopar_function.F_1a2b3c4d(x, w)

A trace through `F.forward` would give its result the derivative of what forward computes. The
operator calls `F.apply`, so autograd records F's own backward wherever the operator runs: on the
ranks, and on fake tensors while planning.

There is one operator per class and per set of arguments that are not tensors: those are part of the
operator. Its name has a hash of them, so it is the same in every process. A device among them
stands for the device of the tensors. The operator exists in processes that traced a call of it.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from autopar.operators.function_probe import Results, UnsupportedFunctionError, probe

NAMESPACE = "autopar_function"
_LITERALS = (bool, int, float, str, torch.dtype, torch.memory_format, torch.layout)
_HASH_LENGTH = 8

Function = type[torch.autograd.Function]


class _Slot:
    """Stands for an argument that a call fills in."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


_TENSOR, _ABSENT, _DEVICE = _Slot("<tensor>"), _Slot("<no tensor>"), _Slot("<device>")


@dataclass
class FunctionOperator:
    """One operator: a class and all arguments but the tensors.

    template   the arguments, with slots for tensors, absent tensors (None) and devices
    results    which results are tensors, and which of those are differentiable
    """

    cls: Function
    name: str
    template: tuple[Any, ...]
    results: Results
    op: torch._ops.OpOverload = field(init=False)

    def call(self, *tensors: Tensor | None) -> Any:
        """What `cls.apply` returns, as a tensor or a tuple of tensors."""
        device = next((t.device for t in tensors if t is not None), None)
        values = iter(tensors)
        args = [
            next(values) if item in (_TENSOR, _ABSENT) else _with_device(item, device)
            for item in self.template
        ]
        return self.results.tensors(self.cls.apply(*args))


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function as a call of its operator on `tensors`."""

    function: FunctionOperator
    tensors: tuple[Tensor | None, ...]

    def run(self) -> Any:
        """The result in the structure that the function returns."""
        return self.function.results.rebuilt(self.function.op(*self.tensors))


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_by_name: dict[str, FunctionOperator] = {}


def function_call(cls: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FunctionCall:
    """`cls.apply(*args, **kwargs)` as a call of an operator, which is made if there is none yet.

    Raises `UnsupportedFunctionError` for a call that no operator can stand for.
    """
    args = _positional(cls, args, kwargs)
    template = tuple(_slot(cls, i, value) for i, value in enumerate(args))
    tensors = tuple(
        value for value, slot in zip(args, template, strict=True) if slot in (_TENSOR, _ABSENT)
    )
    found = _known(cls, template)
    if isinstance(found, str):
        found = _define(FunctionOperator(cls, found, template, probe(cls, args)))
    return FunctionCall(found, tensors)


def function_of(op: str) -> FunctionOperator | None:
    """What an overload name, `autopar_function.F_1a2b3c4d.default`, stands for; else None."""
    return _by_name.get(op.removeprefix(f"{NAMESPACE}.").removesuffix(".default"))


def full_name(cls: Function) -> str:
    """Module and name of a class; a script is `__main__` in processes that it starts, too."""
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}.{cls.__qualname__}"


def is_same_function(a: Function, b: Function) -> bool:
    """Are they one class, or one `class` statement that ran twice with the same surroundings?"""
    return a is b or (full_name(a) == full_name(b) and _members(a) == _members(b))


def _members(cls: Function) -> dict[str, Any]:
    return {
        name: _comparable(inspect.unwrap(value.__func__) if _is_wrapped(value) else value)
        for name, value in vars(cls).items()
        if not (name.startswith("__") or name == "_backward_cls")
    }


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod))


def _comparable(value: Any) -> Any:
    """Equal for equal code with the same surroundings; other objects equal only themselves."""
    if not isinstance(value, FunctionType):
        return value if isinstance(value, (*_LITERALS, type(None))) else id(value)
    held = [cell.cell_contents for cell in value.__closure__ or ()]
    cells = [v if isinstance(v, (*_LITERALS, type(None))) else id(v) for v in held]
    return value.__code__, repr(value.__defaults__), cells


def _positional(cls: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments by position, with defaults, as `apply` itself does it."""
    if cls.setup_context is torch.autograd.Function.setup_context:
        if kwargs:
            raise UnsupportedFunctionError(
                f"{cls.__qualname__}.apply got keyword arguments {sorted(kwargs)}",
                "give them by position, or define setup_context in the class",
            )
        return tuple(args)
    bound = inspect.signature(cls.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


def _slot(cls: Function, position: int, value: Any) -> Any:
    """What stands for an argument in the template."""
    if isinstance(value, Tensor):
        return _TENSOR
    if value is None:
        return _ABSENT
    return _static(value, f"argument {position} of {cls.__qualname__}.apply")


def _static(value: Any, what: str) -> Any:
    if value is None or isinstance(value, _LITERALS):
        return value
    if isinstance(value, torch.device):
        return _DEVICE
    if type(value) is list:
        return [_static(v, what) for v in value]
    if type(value) in (tuple, torch.Size):
        return tuple(_static(v, what) for v in value)
    if type(value) is dict and all(isinstance(k, (str, int)) for k in value):
        return {k: _static(v, what) for k, v in value.items()}
    if isinstance(value, Tensor):
        raise UnsupportedFunctionError(
            f"{what} holds tensors in a container",
            "pass every tensor as an argument of its own: autograd sees no others",
        )
    hint = "pass tensors and plain values (numbers, strings, dtypes, lists of them)"
    if isinstance(value, torch.nn.Module):
        hint = "call the module in the model's forward, and pass what it returns"
    raise UnsupportedFunctionError(f"{what} is a {type(value).__name__}: {value!r:.60}", hint)


def _with_device(item: Any, device: torch.device | None) -> Any:
    if item is _DEVICE:
        return device
    if isinstance(item, (tuple, list)):
        return type(item)([_with_device(v, device) for v in item])
    if isinstance(item, dict):
        return {k: _with_device(v, device) for k, v in item.items()}
    return item


def _known(cls: Function, template: tuple[Any, ...]) -> FunctionOperator | str:
    """The operator of a class and a template, or the name to give it.

    Another class of the same name, such as an edited one, gets a number.
    """
    text = re.sub(r"\W+", "_", cls.__qualname__.replace("<locals>", "")).strip("_")
    digest = hashlib.sha256(f"{full_name(cls)}{template!r}".encode()).hexdigest()[:_HASH_LENGTH]
    stem = name = f"{text}_{digest}"
    n_others = 0
    while name in _by_name:
        found = _by_name[name]
        if is_same_function(found.cls, cls):
            found.cls = cls
            return found
        n_others += 1
        name = f"{stem}_{n_others}"
    return name


def _define(function: FunctionOperator) -> FunctionOperator:
    """Register the operator with torch."""
    slots = [item for item in function.template if item in (_TENSOR, _ABSENT)]
    kinds = ["Tensor" if slot is _TENSOR else "Tensor?" for slot in slots]
    arguments = [f"{kind} x{i}" for i, kind in enumerate(kinds)]
    returns = ", ".join(["Tensor"] * function.results.n_tensors)
    returns = returns if function.results.n_tensors == 1 else f"({returns})"
    _library.define(f"{function.name}({', '.join(arguments)}) -> {returns}")
    # Autograd sees what the kernel of a composite operator does, here the Function itself.
    kernel: Callable[..., Any] = function.call
    _library.impl(function.name, kernel, "CompositeImplicitAutograd")
    function.op = getattr(getattr(torch.ops, NAMESPACE), function.name).default
    _by_name[function.name] = function
    return function
