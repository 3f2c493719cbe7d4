"""Runs an `autograd.Function` once, on tensors of its own, to see whether an operator can do it.

An operator stands for a function of its tensor arguments only. So these are refused, because they
would give other results on the ranks than on one process:

    random numbers      each rank draws its own
    other tensors       read or written, but no arguments: the ranks would hold different ones
    writes              to arguments (`ctx.mark_dirty`)
    communication       the ranks of a group are not those of the user's code
    results             that are not tensors

The run needs the shapes only, so under a fake mode nothing is computed. It is not recorded by a
trace that is going on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class UnsupportedFunctionError(RuntimeError):
    """A call of an `autograd.Function` that cannot be an operator; `hint` is a way out."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


@dataclass(frozen=True)
class Results:
    """What a function returns.

    is_tensor        per result: a tensor, or None
    is_tuple         a tuple, rather than a single tensor
    differentiable   positions among the tensors of those that carry gradient
    """

    is_tensor: tuple[bool, ...]
    is_tuple: bool
    differentiable: frozenset[int]

    @property
    def n_tensors(self) -> int:
        return sum(self.is_tensor)

    def tensors(self, result: Any) -> Any:
        """The tensors of a result, as an operator returns them."""
        items = result if self.is_tuple else (result,)
        found = tuple(item for item in items if item is not None)
        return found[0] if self.n_tensors == 1 else found

    def rebuilt(self, tensors: Any) -> Any:
        """The result as the function returns it."""
        rest = iter((tensors,) if self.n_tensors == 1 else tensors)
        items = tuple(next(rest) if given else None for given in self.is_tensor)
        return items if self.is_tuple else items[0]


@contextmanager
def untraced() -> Iterator[None]:
    """No trace records what runs here: neither operators nor modes that are set."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


def probe(cls: type[torch.autograd.Function], args: Sequence[Any]) -> Results:
    """What the function returns for arguments like these; its backward runs, too.

    Raises `UnsupportedFunctionError` if it is more than a function of its tensors.
    """
    name = cls.__qualname__
    with untraced():
        copies = [_copy(value) if isinstance(value, Tensor) else value for value in args]
        own = [value for value in copies if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in own]
        with torch.enable_grad(), _Watch(name, own):
            result = cls.apply(*copies)
            if versions != [tensor._version for tensor in own]:
                raise UnsupportedFunctionError(
                    f"{name} changes an argument in place",
                    "return a new tensor instead of writing to an argument (ctx.mark_dirty)",
                )
            results = _described(name, result)
            _run_backward(results.tensors(result), own)
    return results


def _copy(tensor: Tensor) -> Tensor:
    """A copy with gradient; not a leaf, so that writing to it is seen here, not by autograd."""
    leaf = tensor.detach()
    with torch.enable_grad():
        leaf = leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        return leaf.clone(memory_format=torch.preserve_format)


def _described(name: str, result: Any) -> Results:
    is_tuple = isinstance(result, tuple)
    items = result if is_tuple else (result,)
    for i, item in enumerate(items):
        if item is not None and not isinstance(item, Tensor):
            raise UnsupportedFunctionError(
                f"result {i} of {name} is a {type(item).__name__}, not a tensor",
                "return tensors, alone or in a tuple",
            )
    tensors = [item for item in items if item is not None]
    if not tensors:
        raise UnsupportedFunctionError(f"{name} returns no tensor", "return what it computes")
    return Results(
        tuple(item is not None for item in items),
        is_tuple,
        frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad),
    )


def _run_backward(result: Any, arguments: Sequence[Tensor]) -> None:
    outputs = [t for t in pytree.tree_leaves(result) if t.requires_grad]
    inputs = [argument for argument in arguments if argument.requires_grad]
    if outputs and inputs:
        seeds = [torch.empty_like(output) for output in outputs]
        torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


class _Watch(TorchDispatchMode):
    """Refuses operators whose result is no function of the tensors known so far."""

    def __init__(self, name: str, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.name = name
        self.arguments = {_storage(t) for t in arguments}
        self.known = set(self.arguments)
        self.alive: list[Tensor] = list(arguments)  # so that no storage is freed and used again

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnsupportedFunctionError(
                f"{self.name} draws random numbers ({func})",
                "draw them in the model's forward (torch.rand, torch.randn) and pass them as an "
                "argument, or draw outside of the model and pass them as an input",
            )
        if func.namespace in _COMMUNICATION:
            raise UnsupportedFunctionError(
                f"{self.name} communicates between ranks ({func})",
                "leave communication to autopar: write what one process computes",
            )
        for tensor in self._tensors((args, kwargs)):
            if func is not aten.lift_fresh.default and _storage(tensor) not in self.known:
                raise UnsupportedFunctionError(
                    f"{self.name} uses a tensor of shape {list(tensor.shape)} that is not among "
                    f"its arguments ({func})",
                    "pass the tensor to apply",
                )
        result = func(*args, **kwargs)
        for tensor in self._tensors(result):
            self.known.add(_storage(tensor))
            self.alive.append(tensor)
        return result

    def _tensors(self, tree: Any) -> Iterator[Tensor]:
        return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
