"""Runs single operators of a program on fake tensors, once for all equal calls.

Equal calls are common: in repeated layers, in other programs of the same model (evaluation, one
microbatch, one stage), and in other models of the process. All share one result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import NotSupportedError
from autopar.program.graph import Program

T = TypeVar("T")
_MAX_KNOWN = 1 << 14


class PerCall(Generic[T]):
    """The results of `run(program, node, mode)`, cached by `call_key`.

    `measures` says in error messages what `run` measures. Raises `NotSupportedError` for an
    operator that does not run on fake tensors.
    """

    def __init__(
        self, run: Callable[[Program, torch.fx.Node, FakeTensorMode], T], measures: str
    ) -> None:
        self._run = run
        self._measures = measures
        self._known: OrderedDict[tuple[Any, ...], T] = OrderedDict()

    def of_all(
        self, program: Program, nodes: Iterable[torch.fx.Node], equal_calls: Mapping[str, str]
    ) -> dict[str, T]:
        """Results by node name. `equal_calls` maps a node to the first node with an equal call."""
        found: dict[str, T] = {}
        for node in nodes:
            first = equal_calls.get(node.name, node.name)
            found[node.name] = found[first] if first in found else self.of(program, node)
        return found

    def of(self, program: Program, node: torch.fx.Node) -> T:
        key = call_key(program, node)
        if key not in self._known:
            try:
                found = self._run(program, node, FakeTensorMode())
            except Exception as error:
                is_torchs = str(node.target).startswith("aten.")
                raise NotSupportedError(
                    f"{node.target} does not run on fake tensors, so {self._measures} is unknown: "
                    f"{error}",
                    where=program.where(node.name),
                    hint="compute the same with other operators, which torch can differentiate"
                    if is_torchs
                    else "give a custom operator a fake kernel (torch.library.register_fake), and "
                    "a backward that reads no values",
                ) from error
            self._known[key] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return found
        return self._known[key]


def call_key(program: Program, node: torch.fx.Node) -> tuple[Any, ...]:
    """All that the effect of a call depends on: the arguments, with a description of each tensor.

    Left out is `occurrence`, the number of a random draw (as in `OpCall.likeness`).
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    first_use: dict[torch.fx.Node, int] = {}

    def describe(source: torch.fx.Node) -> Any:
        index = first_use.setdefault(source, len(first_use))
        return (index, *description(program, source))

    names = (argument.name for argument in node.target._schema.arguments)
    given = [a for name, a in zip(names, node.args, strict=False) if name != "occurrence"]
    named = {name: a for name, a in node.kwargs.items() if name != "occurrence"}
    # As text, because 1, 1.0 and True are equal as dictionary keys.
    arguments = torch.fx.node.map_arg((given, named), describe)
    return (node.target, node.name in program.has_grad, repr(arguments), _attention_kernels())


def description(program: Program, source: torch.fx.Node) -> tuple[Any, ...]:
    """The properties of a tensor that the effect of a call depends on."""
    value, has_grad = source.meta["val"], source.name in program.has_grad
    return (tuple(value.shape), value.stride(), value.dtype, value.device, has_grad)


def _attention_kernels() -> tuple[bool, ...]:
    """The attention kernels that this process allows; they differ in what they keep."""
    cuda = torch.backends.cuda
    return (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())


def fresh_like(program: Program, source: torch.fx.Node) -> torch.Tensor:
    """A new leaf tensor like the value of a node; call it under a fake mode."""
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
