"""Running single operators of a program on fake tensors, once for all calls that are alike.

Repeated layers, the same layer in other programs of a model (evaluation, a microbatch, one stage),
and other models of the process make equal calls; what one of them shows holds for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import NotSupportedError
from autopar.program import Program

T = TypeVar("T")
_MAX_KNOWN = 1 << 14


class PerCall(Generic[T]):
    """What `run(program, node, mode)` finds of a call, which is `wanted`, remembered by `call_key`.

    Raises `NotSupportedError` for an operator that does not run on fake tensors.
    """

    def __init__(
        self, run: Callable[[Program, torch.fx.Node, FakeTensorMode], T], wanted: str
    ) -> None:
        self._run = run
        self._wanted = wanted
        self._known: OrderedDict[tuple[Any, ...], T] = OrderedDict()

    def of_all(
        self, program: Program, nodes: Iterable[torch.fx.Node], alike: Mapping[str, str]
    ) -> dict[str, T]:
        """By name; `alike` names the first of those whose calls are known to be alike."""
        found: dict[str, T] = {}
        for node in nodes:
            first = alike.get(node.name, node.name)
            found[node.name] = found[first] if first in found else self.of(program, node)
        return found

    def of(self, program: Program, node: torch.fx.Node) -> T:
        key = call_key(program, node)
        if key not in self._known:
            try:
                found = self._run(program, node, FakeTensorMode())
            except Exception as error:
                raise NotSupportedError(
                    f"{node.target} does not run on fake tensors, so {self._wanted} is unknown: "
                    f"{error}",
                    where=program.where(node.name),
                    hint="give a custom operator a fake kernel: torch.library.register_fake",
                ) from error
            self._known[key] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return found
        return self._known[key]


def call_key(program: Program, node: torch.fx.Node) -> tuple[Any, ...]:
    """What decides the effect of a call: its arguments, with a description of each tensor; but not
    which draw of random numbers it is (`OpCall.likeness`)."""
    assert isinstance(node.target, torch._ops.OpOverload)
    first_use: dict[torch.fx.Node, int] = {}

    def describe(source: torch.fx.Node) -> Any:
        index = first_use.setdefault(source, len(first_use))
        return (index, *description(program, source))

    names = (argument.name for argument in node.target._schema.arguments)
    given = [a for name, a in zip(names, node.args, strict=False) if name != "occurrence"]
    named = {name: a for name, a in node.kwargs.items() if name != "occurrence"}
    # By text: as dictionary keys 1, 1.0 and True would be one argument.
    arguments = torch.fx.node.map_arg((given, named), describe)
    return (node.target, node.name in program.has_grad, repr(arguments), _attention_kernels())


def description(program: Program, source: torch.fx.Node) -> tuple[Any, ...]:
    """What of a tensor decides the effects of a call that takes it."""
    value, has_grad = source.meta["val"], source.name in program.has_grad
    return (tuple(value.shape), value.stride(), value.dtype, value.device, has_grad)


def _attention_kernels() -> tuple[bool, ...]:
    """Which kernels attention may choose: a setting of the process, and they keep unlike things."""
    cuda = torch.backends.cuda
    return (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())


def fresh_like(program: Program, source: torch.fx.Node) -> torch.Tensor:
    """A new leaf like the value of a node; call it under a fake mode."""
    value = source.meta["val"]
    return torch.empty_strided(
        tuple(value.shape),
        value.stride(),
        dtype=value.dtype,
        device=value.device,
        requires_grad=source.name in program.has_grad,
    )


def as_list(result: Any) -> list[torch.Tensor | None]:
    """An operator's results as a list, whether it has one or several."""
    return list(result) if isinstance(result, (list, tuple)) else [result]
