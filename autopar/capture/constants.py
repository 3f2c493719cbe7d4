"""Constants: tensors that depend on no input and no parameter (position ids, masks, tables).

Their subgraph is computed once per program, on cpu, when the first one is requested. Until then
a constant is only a shape, so capture and planning stay cheap. The leaves of the subgraph are
buffers of the user's model, copied at capture, and tensors that are literal in its code. Buffers
of a model on `meta` have no values, so they are initialised as the model would do it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx, nn

from autopar.capture.dependence import subgraph
from autopar.errors import CaptureError

Leaf = Callable[[], torch.Tensor]


class ConstantStore:
    """Computes all constants of one program at the first request and keeps them."""

    def __init__(self, outputs: tuple[fx.Node, ...], leaves: Mapping[str, Leaf]) -> None:
        self._graph, inputs = subgraph(outputs)
        self._inputs = [(node.name, node.meta["val"].dtype) for node in inputs]
        self._leaves = {node.name: leaves[node.name] for node in inputs}
        self._names = [node.name for node in outputs]
        self._values: dict[str, torch.Tensor] | None = None

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the leaves that the constants are computed from."""
        return tuple(name for name, _ in self._inputs)

    def value(self, name: str) -> torch.Tensor:
        if self._values is None:
            with torch.no_grad():
                values = [self._leaves[leaf]().to(dtype) for leaf, dtype in self._inputs]
                results = fx.Interpreter(fx.GraphModule(nn.Module(), self._graph)).run(*values)
            self._values = dict(zip(self._names, results, strict=True))
        return self._values[name]

    def callables(self) -> dict[str, Leaf]:
        """Name of a constant -> function that returns it."""
        return {name: partial(self.value, name) for name in self._names}


def literal(tensor: torch.Tensor, what: str) -> Leaf:
    """A tensor in the code of the model; what is read does not change if it is written to later."""

    def read() -> torch.Tensor:
        if tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
            raise CaptureError(
                f"{what} is a tensor without values",
                hint="register it as a buffer of a module with reset_parameters()",
            )
        return tensor.detach().cpu().clone()

    return read


def buffer(model: nn.Module, name: str) -> Leaf:
    """A buffer of the user's model, as it is now: the user may write to it later."""
    tensor = model.get_buffer(name)
    if not tensor.is_meta:
        value = tensor.detach().to("cpu", copy=True)
        return lambda: value
    return partial(_initialise, model, name)


def _initialise(model: nn.Module, name: str) -> torch.Tensor:
    """The value that `reset_parameters` or `_init_weights` gives to a buffer on `meta`.

    It runs on a copy of the owning module. The buffers of the copy are first filled with a
    sentinel, which shows whether the initialiser wrote them.
    """
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    twin = copy.deepcopy(owner)
    for key, value in list(twin.named_buffers(recurse=False)):
        twin._buffers[key] = torch.full_like(value, _sentinel(value.dtype), device="cpu")
    for key, parameter in list(twin.named_parameters(recurse=False)):
        empty = torch.empty_like(parameter, device="cpu")
        twin._parameters[key] = nn.Parameter(empty, parameter.requires_grad)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for initialise in _initialisers(model, path, twin):
            initialise()
            value = twin.get_buffer(leaf)
            if not bool((value == _sentinel(value.dtype)).any()):
                return value.detach()
    raise CaptureError(
        f"buffer `{name}` has no value: the model is on meta and nothing initialises it",
        hint=f"give {type(owner).__name__} a reset_parameters() that fills it, or build the "
        "model on cpu",
    )


def _initialisers(model: nn.Module, path: str, twin: nn.Module) -> list[Callable[[], object]]:
    found: list[Callable[[], object]] = []
    if callable(reset := getattr(twin, "reset_parameters", None)):
        found.append(reset)
    while True:  # the nearest enclosing model with `_init_weights` (transformers)
        if callable(init := getattr(model.get_submodule(path), "_init_weights", None)):
            found.append(partial(init, twin))
        if not path:
            return found
        path = path.rpartition(".")[0]


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialiser writes; booleans have no such value and use True."""
    if dtype == torch.bool:
        return True
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).min
