"""Initial values of a model on `meta`, module by module, without ever holding the whole model.

A module is initialised by its `reset_parameters` (PyTorch's convention), then by the
`_init_weights` of the nearest enclosing model that has one (transformers' convention). Children
come before parents, as when the model is built. A dry run on `meta`, which costs nothing, finds
what each call writes. Calls that write a common tensor form one group: a parent that rescales a
child's weight, or tied weights. Then

    values(group) = its calls, in order, on real tensors, under a seed from (seed, first name)

So values depend only on the seed and the names, not on the rank or on which groups are requested.
Floating-point tensors start as NaN, so a tensor that no call fills is detected.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import StateError

Call = Callable[[], object]


def initial_values(
    model: nn.Module, wanted: Sequence[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """(name, value on CPU) of each wanted parameter and buffer, in no given order.

    Any of a tensor's names will do. The model is not modified.

    Raises `StateError` for a tensor that no initialiser fills.
    """
    twin = _Twin.of(model)
    groups = _groups(twin)
    by_key = {key: group for group in groups for key in group.keys}
    asked: dict[str, list[str]] = {}
    for name in wanted:
        asked.setdefault(twin.key_of[name], []).append(name)
    unknown = [names[0] for key, names in asked.items() if key not in by_key]
    if unknown:
        raise _not_filled(unknown)
    for group in groups:
        if not group.keys & asked.keys():
            continue
        values = _run(twin, group, seed)
        for key in sorted(group.keys & asked.keys()):
            for name in asked[key]:
                yield name, values[key]


def _not_filled(names: Sequence[str]) -> StateError:
    return StateError(
        f"the model is on meta and nothing initialises {', '.join(names[:8])}"
        + (f" and {len(names) - 8} more" if len(names) > 8 else ""),
        hint="give the module a reset_parameters() that fills it, build the model on CPU with "
        'weights="rank0", or give a path',
    )


@dataclass
class _Twin:
    """A copy of the model on `meta`. A tensor's key is the first of its names."""

    model: nn.Module
    key_of: dict[str, str]
    names_of: dict[str, list[str]]

    @staticmethod
    def of(model: nn.Module) -> _Twin:
        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        memo: dict[int, Any] = {}
        first: dict[int, str] = {}
        names_of: dict[str, list[str]] = {}
        for name, tensor in named.items():
            if id(tensor) not in memo:
                empty = torch.empty_like(tensor, device="meta", requires_grad=False)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(empty, False) if is_parameter else empty
                first[id(tensor)] = name
            names_of.setdefault(first[id(tensor)], []).append(name)
        key_of = {name: first[id(tensor)] for name, tensor in named.items()}
        return _Twin(copy.deepcopy(model, memo), key_of, names_of)

    def tensor(self, key: str) -> Tensor:
        owner, leaf = self._slot(key)
        found: Tensor = getattr(owner, leaf)
        return found

    def replace(self, key: str, value: Tensor) -> None:
        """Put `value` in every place that holds the tensor."""
        for name in self.names_of[key]:
            owner, leaf = self._slot(name)
            table: dict[str, Any] = (
                owner._parameters if leaf in owner._parameters else owner._buffers
            )
            table[leaf] = nn.Parameter(value, False) if table is owner._parameters else value

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf


@dataclass
class _InitCalls:
    """Calls that write common tensors, and those tensors."""

    calls: list[Call] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


def _groups(twin: _Twin) -> list[_InitCalls]:
    """The groups of initialisation calls; calls are in the model's order."""
    order: list[tuple[Call, set[str]]] = []
    storages = {twin.tensor(k).untyped_storage()._cdata: k for k in twin.names_of}
    for path, module in _children_first(twin.model):
        own = {
            twin.key_of[f"{path}.{name}" if path else name]
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        }
        reset, outer = _initialisers(twin.model, path, module)
        written = [_rehearse(call, twin, path, storages) for call in outer]
        # Building the model would run both; skip the first if the second overwrites all of it.
        if reset is not None and not own <= set().union(*written):
            order.append((reset, _rehearse(reset, twin, path, storages)))
        order += zip(outer, written, strict=True)
    groups: list[_InitCalls] = []
    for call, keys in order:
        if not keys:
            continue
        touched = [g for g in groups if g.keys & keys]
        if not touched:
            groups.append(_InitCalls([call], set(keys)))
            continue
        merged, *others = touched
        for other in others:
            merged.calls += other.calls
            merged.keys |= other.keys
            groups.remove(other)
        merged.calls.append(call)
        merged.keys |= keys
    return groups


def _children_first(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, model


def _initialisers(model: nn.Module, path: str, module: nn.Module) -> tuple[Call | None, list[Call]]:
    """(the module's own initialiser, that of the nearest enclosing model if any)."""
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    own = own if callable(own) else None
    while True:
        around = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(around):
            return own, [partial(around, module)]
        if not path:
            return own, []
        path = path.rpartition(".")[0]


class _Writes(TorchDispatchMode):
    """Records which storages are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = given.get(argument.name)
            if written and isinstance(value, Tensor):
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _rehearse(call: Call, twin: _Twin, path: str, storages: Mapping[int, str]) -> set[str]:
    """The keys of the tensors that `call` writes; the whole subtree's if it cannot run on meta."""
    with torch.no_grad(), torch.random.fork_rng(devices=()), _Writes() as writes:
        try:
            call()
        except (RuntimeError, NotImplementedError, ValueError):
            prefix = f"{path}." if path else ""
            return {key for name, key in twin.key_of.items() if name.startswith(prefix)}
    return {storages[s] for s in writes.storages if s in storages}


def _run(twin: _Twin, group: _InitCalls, seed: int) -> dict[str, Tensor]:
    """The values of one group; the caller owns their memory."""
    before = {key: twin.tensor(key) for key in group.keys}
    values = {key: _unfilled(tensor) for key, tensor in before.items()}
    for key, value in values.items():
        twin.replace(key, value)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            torch.manual_seed(zlib.crc32(f"{seed}:{min(group.keys)}".encode()))
            for call in group.calls:
                call()
        # An initialiser may have replaced our tensors by its own.
        values = {key: twin.tensor(key).detach() for key in values}
    finally:
        for key, tensor in before.items():
            twin.replace(key, tensor)
    left = [k for k, v in values.items() if v.is_floating_point() and bool(v.isnan().any())]
    if left:
        raise _not_filled(sorted(left))
    return values


def _unfilled(tensor: Tensor) -> Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return out.fill_(float("nan")) if tensor.is_floating_point() else out.zero_()
