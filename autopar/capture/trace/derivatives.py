"""Traces `torch.autograd.grad(...)` in forward: its kernels become operators of the graph.

Autograd's engine runs as it does in one process, and the trace sees the operators that it calls.
What it does not know are the tensors that they read: autograd hands on copies of what it saved,
and the trace has composite operators whole, not the kernels inside that made some of the saved
tensors (a transposed weight, a norm's statistics). So a model that asks for derivatives is traced
once more, with all its kernels recorded. A tensor that the trace does not know is then

    the tensor that it knows in the same memory, with the same history
    the result of a recorded kernel, which is put into the graph     else

Derivatives without `create_graph=True` are detached. `backward()` is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.trace.exchange import Exchange
from autopar.errors import NotSupportedError

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default)
# Operators with results of which torch has no derivative: statistics, which `rewrites/` computes
# anew, and sums of weights that do not learn.
_KNOWN_STATISTICS = (
    aten._native_batch_norm_legit.no_stats,
    aten.log_sigmoid_forward.default,
    aten.native_layer_norm.default,
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
)


class DerivativeAskedError(Exception):
    """A trace without recorded kernels met `torch.autograd.grad`."""


@dataclass(frozen=True)
class _Kernel:
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Recorded(TorchDispatchMode):
    """All kernels of a forward pass, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        # Memory -> the tensors in it that kernels made, each with its kernel.
        self.made: dict[int, list[tuple[Tensor, _Kernel]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = dict(kwargs or {})
        result = func(*args, **own)
        kernel = _Kernel(func, tuple(args), own, result)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.made.setdefault(_memory(tensor), []).append((tensor, kernel))
        return result


class _Tracker(MutableMapping[Tensor, Any]):
    """The tracer's table from tensors to nodes; finds copies and recorded tensors, too."""

    def __init__(self, tracer: Any, recorded: Recorded) -> None:
        self._tracer, self._recorded = tracer, recorded
        self._own: MutableMapping[Tensor, Any] = tracer.tensor_tracker
        self._known: dict[int, list[Tensor]] = {}
        for tensor in self._own:
            self._known.setdefault(_memory(tensor), []).append(tensor)

    def _find(self, tensor: Tensor) -> bool:
        """Enter an unknown tensor into the table, if it can be found."""
        if tensor in self._own and not (tensor.grad_fn is not None and self._is_detached(tensor)):
            return True
        if not isinstance(tensor, FakeTensor):
            return False  # a constant
        memory = _memory(tensor)
        for known in self._known.get(memory, ()):
            if known is not tensor and _is_copy(known, tensor) and not self._is_detached(known):
                self[tensor] = self._own[known]
                return True
        for made, kernel in self._recorded.made.get(memory, ()):
            if _is_copy(made, tensor):
                self._put(kernel)
                self[tensor] = self._own[made]
                return True
        return False

    def _is_detached(self, tensor: Tensor) -> bool:
        """Autograd detaches what it saved, and gives the copy its history back."""
        return self._own[tensor].proxy.node.target is aten.detach.default

    def _put(self, kernel: _Kernel) -> None:
        """Put a recorded kernel into the graph."""
        if kernel.func in _SAME:
            self[kernel.result] = self[kernel.args[0]]
            return
        check_differentiable(kernel.func, pytree.tree_leaves(kernel.result))
        is_random = torch.Tag.nondeterministic_seeded in kernel.func.tags
        if is_random or kernel.func._schema.is_mutable:
            why = "draws random numbers" if is_random else "writes in place"
            raise NotSupportedError(
                f"torch.autograd.grad in forward through `{kernel.func}`, which {why}",
                hint="leave it out of what the derivative goes through (dropout: p=0, or eval mode "
                "of its module)",
            )
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: self[t].proxy, (kernel.args, kernel.kwargs)
        )
        name = kernel.func.overloadpacket.__name__
        proxy = self._tracer.create_proxy("call_function", kernel.func, args, kwargs, name=name)
        self._tracer.tensor_tracker = self._own  # results are not to be found, but entered
        track_tensor_tree(kernel.result, proxy, constant=None, tracer=self._tracer)
        self._tracer.tensor_tracker = self

    def __getitem__(self, tensor: Tensor) -> Any:
        if not self._find(tensor):
            raise KeyError(tensor)
        return self._own[tensor]

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._find(tensor)

    def __setitem__(self, tensor: Tensor, proxy: Any) -> None:
        self._own[tensor] = proxy
        self._known.setdefault(_memory(tensor), []).append(tensor)

    def __delitem__(self, tensor: Tensor) -> None:
        del self._own[tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def check_differentiable(func: torch._ops.OpOverload, results: Sequence[Any]) -> None:
    """Raise `NotSupportedError` for results without gradient beside one that has it."""
    found = [t for t in results if isinstance(t, Tensor)]
    has_grad = {t.requires_grad for t in found if t.is_floating_point() or t.is_complex()}
    if len(has_grad) > 1 and func not in _KNOWN_STATISTICS:
        raise NotSupportedError(
            f"a derivative in forward through `{func}`, of which autograd keeps results that have "
            "no derivative",
            hint="write it with operators of tensors",
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_copy(known: Tensor, tensor: Tensor) -> bool:
    """Do both see the same elements, and have the same history?"""
    return (
        known.shape == tensor.shape
        and known.stride() == tensor.stride()
        and known.storage_offset() == tensor.storage_offset()
        and known.dtype == tensor.dtype
        and known.is_conj() == tensor.is_conj()
        and known.is_neg() == tensor.is_neg()
        and known.requires_grad == tensor.requires_grad
        and known.grad_fn is tensor.grad_fn
        and known.output_nr == tensor.output_nr
    )


class _Here(threading.local):
    recorded: Recorded | None = None


_here = _Here()


@contextmanager
def derivatives_traced(recorded: Recorded | None) -> Iterator[None]:
    """Derivatives in a trace, whose forward is `recorded`; None: they raise
    `DerivativeAskedError`."""
    with _grad.on(), _backward.on():
        outer, _here.recorded = _here.recorded, recorded
        try:
            yield
        finally:
            _here.recorded = outer


@contextmanager
def derivatives_unseen() -> Iterator[None]:
    """Within a trace, derivatives that are asked for here are another's affair."""
    with _grad.off(), _backward.off():
        yield


def grad(*args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.grad(*args, **kwargs)` does in a trace."""
    mode = get_proxy_mode()
    if mode is None:
        return _grad.original(*args, **kwargs)
    if _here.recorded is None:
        raise DerivativeAskedError
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "allow_unused",
             "is_grads_batched")  # fmt: skip
    bound = dict(zip(names, args, strict=False)) | kwargs
    if bound.get("is_grads_batched"):
        raise NotSupportedError(
            "torch.autograd.grad(..., is_grads_batched=True) in forward",
            hint="call it once for each of grad_outputs",
        )
    tracer: Any = mode.tracer
    tracker = tracer.tensor_tracker
    tracer.tensor_tracker = _Tracker(tracer, _here.recorded)
    try:
        with _grad.off():
            found = _grad.original(*args, **kwargs)
    finally:
        tracer.tensor_tracker = tracker
    if bound.get("create_graph"):
        return found
    return tuple(None if g is None else g.detach() for g in found)


def backward(*args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.backward(*args, **kwargs)` does in a trace."""
    if get_proxy_mode() is not None:
        raise NotSupportedError(
            "backward() in forward, which adds to `.grad`",
            hint="torch.autograd.grad(..., create_graph=True) returns derivatives, and is traced",
        )
    return _backward.original(*args, **kwargs)


_grad = Exchange(torch.autograd.grad, grad)
_backward = Exchange(torch.autograd.backward, backward)
