"""Records the kernels that one operator runs, and those of its derivative.

The operator runs once on fake tensors, then `torch.autograd.grad`. A dispatch mode below autograd
sees every kernel of both, in the order in which autograd runs them. Tensors become slots:

    slots 0 .. n-1   the tensor arguments, in order; one that is passed twice has two
    further slots    results of kernels, and the gradients of the operator's results

A kernel that writes in place makes a new slot. It may only write to what an earlier kernel of the
recording made. What can't be written down is raised once the operator has run, not from the mode:
torch's C++ calls it where an exception ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# A saved tensor is unpacked through a detach: the same tensor for a program without autograd.
_SAME = (aten.detach.default, aten.alias.default)


class UntraceableError(Exception):
    """The operator's kernels can't be written down: they depend on values, or on other tensors."""


class Meta(NamedTuple):
    """A tensor without its values. Only the kernels that run depend on `device`, not the text.

    `is_conj`: its memory holds the conjugates, which kernels must ask for.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    has_grad: bool = False
    is_conj: bool = False

    @staticmethod
    def of(tensor: Tensor, has_grad: bool = False) -> Meta:
        shape, stride, device = tuple(tensor.shape), tensor.stride(), tensor.device.type
        return Meta(shape, stride, tensor.dtype, device, has_grad, tensor.is_conj())

    def fake(self) -> Tensor:
        """A tensor like it; call it under a fake mode."""
        held = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return (held.conj() if self.is_conj else held).requires_grad_(self.has_grad)


class Slot(NamedTuple):
    """A tensor of a recording, as an argument."""

    number: int


@dataclass(frozen=True)
class Kernel:
    """One kernel; `outs` are its results by slot, None for a result that is no tensor."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int | None, ...]
    is_view: bool = False

    @cached_property
    def name(self) -> str:
        return str(self.target)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        return tuple(slots_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class Recording:
    """The kernels of one operator and of its derivative.

    metas        of every slot
    outs         the operator's results
    cotangents   the gradients of those results; None for a result without
    gradients    those of the tensor arguments; None for an argument without
    """

    metas: tuple[Meta, ...]
    forward: tuple[Kernel, ...]
    outs: tuple[int | None, ...]
    cotangents: tuple[int | None, ...]
    backward: tuple[Kernel, ...]
    gradients: tuple[int | None, ...]


def slots_in(value: Any) -> list[int]:
    """The slots in an argument, in order."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda x: isinstance(x, Slot))
    return [leaf.number for leaf in leaves if isinstance(leaf, Slot)]


def filled(value: Any, of: Callable[[int], Any]) -> Any:
    """The argument with `of(number)` in place of each slot."""
    if isinstance(value, Slot):
        return of(value.number)
    if isinstance(value, (list, tuple)):
        return type(value)([filled(item, of) for item in value])
    return value


def results_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def run_on_fakes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    metas: Sequence[Meta],
) -> list[Meta | None]:
    """The results of a call; `Slot(i)` stands for a tensor like `metas[i]`."""
    with FakeTensorMode(), torch.set_grad_enabled(any(meta.has_grad for meta in metas)):
        fakes = [meta.fake() for meta in metas]
        call = {name: filled(value, fakes.__getitem__) for name, value in kwargs.items()}
        results = results_of(function(*filled(args, fakes.__getitem__), **call))
    return [Meta.of(r) if isinstance(r, Tensor) else None for r in results]


def record(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    metas: Sequence[Meta],
    gradients: Sequence[Meta | None],
) -> Recording:
    """Record a call and its derivative; `gradients` are like those of its results.

    `Slot(i)` in the arguments stands for a tensor like `metas[i]`. Raises `UntraceableError`, also
    for whatever the operator or its derivative raises on fake tensors.
    """
    mode = FakeTensorMode()
    try:
        with mode:
            fakes = [meta.fake() for meta in metas]
            given = [None if meta is None else meta.fake() for meta in gradients]
        recorder = _Recorder(fakes)
        call = {name: filled(value, fakes.__getitem__) for name, value in kwargs.items()}
        with mode, recorder, torch.enable_grad():
            results = results_of(function(*filled(args, fakes.__getitem__), **call))
        recorder.check()
        outs = tuple(recorder.slot(r) if isinstance(r, Tensor) else None for r in results)
        forward = tuple(recorder.kernels)
        recorder.kernels.clear()
        pairs = [
            (i, r, g)
            for i, (r, g) in enumerate(zip(results, given, strict=True))
            if g is not None and isinstance(r, Tensor) and r.requires_grad
        ]
        cotangents: list[int | None] = [None] * len(results)
        for i, _, g in pairs:
            cotangents[i] = recorder.add(g)
        leaves = [fake for fake in fakes if fake.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if pairs and leaves:
            with mode, recorder, torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(
                    [r for _, r, _ in pairs], leaves, [g for _, _, g in pairs], allow_unused=True
                )
        recorder.check()
        slots = iter([None if g is None else recorder.slot(g) for g in found])
    except Exception as error:  # Python of the user's may be behind an operator
        raise UntraceableError(f"`{function}`: {error}") from error
    return Recording(
        tuple(recorder.metas), forward, outs, tuple(cotangents), tuple(recorder.kernels),
        tuple(next(slots) if fake.requires_grad else None for fake in fakes),
    )  # fmt: skip


@dataclass
class _Recorder(TorchDispatchMode):
    """Sees kernels, below autograd."""

    given: Sequence[Tensor]
    kernels: list[Kernel] = field(default_factory=list)
    metas: list[Meta] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._alive: list[Tensor] = []  # an id is of one tensor as long as that is alive
        self._slots: dict[int, int] = {}
        self._places: dict[tuple[object, ...], int] = {}
        self._stale: set[int] = set()
        self._owned: set[int] = set()  # storages that kernels of the recording made
        self._failed: UntraceableError | None = None
        for tensor in self.given:
            self.add(tensor)

    def add(self, tensor: Tensor) -> int:
        """A new slot for a tensor."""
        number = len(self.metas)
        self.metas.append(Meta.of(tensor))
        self._alive.append(tensor)
        self._slots[id(tensor)] = number
        self._places.setdefault(_place(tensor), number)
        return number

    def slot(self, tensor: Tensor) -> int:
        """The slot of a known tensor."""
        number = self._slots.get(id(tensor))
        if number is None:
            raise UntraceableError(f"a tensor of shape {tuple(tensor.shape)} comes from outside")
        if number in self._stale:
            raise UntraceableError("a view is read after what it views was written")
        return number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        results = results_of(result)
        # Without tensors it is a question about a fake tensor, as `prim.device`.
        if self._failed is None and any(isinstance(r, Tensor) for r in results):
            try:
                self._write_down(func, tuple(args), kwargs, result)
            except UntraceableError as error:
                self._failed = error
        return result

    def check(self) -> None:
        """Raise `UntraceableError` if a kernel that ran can't be written down."""
        if self._failed is not None:
            raise self._failed

    def _write_down(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        read = pytree.tree_map_only(Tensor, lambda t: Slot(self.slot(t)), (args, kwargs))
        if func in _SAME:
            self._alive.append(result)
            self._slots[id(result)] = read[0][0].number
            return
        results = results_of(result)
        if func._schema.is_mutable:
            self._written(args[0], results)
        elif isinstance(result, Tensor) and self._same(result):
            return
        mine = {_storage(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        views = [isinstance(r, Tensor) and _storage(r) in mine for r in results]
        outs = tuple(self.add(r) if isinstance(r, Tensor) else None for r in results)
        self._owned |= {
            _storage(r)
            for r, viewed in zip(results, views, strict=True)
            if isinstance(r, Tensor) and not viewed
        }
        is_view = all(views) and not func._schema.is_mutable
        self.kernels.append(Kernel(func, read[0], read[1], outs, is_view))

    def _same(self, view: Tensor) -> bool:
        """Is it a known tensor again, as `t(t(x))` is? Then it has that one's slot."""
        number = self._places.get(_place(view))
        if number is None or number in self._stale:
            return False
        self._alive.append(view)
        self._slots[id(view)] = number
        return True

    def _written(self, tensor: Tensor, results: Sequence[Any]) -> None:
        """A kernel wrote its first argument: other tensors of that storage must not be read."""
        if len(results) != 1 or results[0] is not tensor or _storage(tensor) not in self._owned:
            raise UntraceableError("a kernel writes to a tensor that others may read")
        for other in self._alive:
            if _storage(other) == _storage(tensor) and id(other) in self._slots:
                self._stale.add(self._slots[id(other)])


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where its elements are: equal for equal views of one storage."""
    bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), *bits


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@lru_cache(maxsize=1 << 12)
def sum_meta(a: Meta, b: Meta) -> Meta:
    """What is known of the sum of two tensors."""
    total = torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") + (
        torch.empty_strided(b.shape, b.stride, dtype=b.dtype, device="meta")
    )
    return a._replace(stride=total.stride(), dtype=total.dtype)


def contiguous_meta(meta: Meta) -> Meta:
    """A contiguous gradient of the same shape."""
    return meta._replace(stride=contiguous_stride(meta.shape), has_grad=False, is_conj=False)


@lru_cache(maxsize=1 << 12)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """torch's strides of a contiguous tensor, in elements."""
    return torch.empty(shape, device="meta").stride()
