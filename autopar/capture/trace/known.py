"""Reads values of constants in the trace, where forward asks for them in Python.

    assert (t[1:] > t[:-1]).all()      a time grid that is a buffer, or written in the code
    if self.initted: ...               a flag that is a buffer
    edges[:, edges[0] != edges[1]]     a mask of a buffer: as the indices where it is true
    F.pad(x, (self.left, 0))           a size that is a buffer: as a number

A value is a constant if its operators lead to buffers and literals alone: then they run, on the
buffers of the user's model. What was read is handed on (`Known.buffers`), so that a step refuses
buffers that have changed since. A trace reads constants only if it is refused without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten
# Names of functions and methods whose result is a Python value, or has a shape from values.
_PYTHON = frozenset(
    "__bool__ __int__ __float__ __index__ __complex__ item tolist is_nonzero equal allclose".split()
)
_SHAPED = frozenset("nonzero argwhere masked_select unique unique_consecutive bincount".split())
# Names of functions that take sizes -> the first argument that may be one.
_SIZED = dict.fromkeys("zeros ones empty full rand randn arange".split(), 0) | dict.fromkeys(
    "pad view reshape expand broadcast_to repeat tile narrow roll unflatten "
    "new_zeros new_ones new_empty new_full".split(),
    1,
)


class Known(TorchFunctionMode):
    """`target` is what is traced, `twin` the copy of the user's `model` in it.

    buffers    names of those that were read
    """

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        super().__init__()
        self._model, self._twin = model, twin
        self.buffers: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _PYTHON or name in _SHAPED:
            found = self._values((tuple(args), named))
            if found is not None:
                with _outside():
                    return func(*found[0], **found[1])
        if name == "__getitem__":
            args = (args[0], pytree.tree_map_only(Tensor, self._indices, args[1]))
            args = (args[0], _flat(args[1]))
        if name in _SIZED:
            at = _SIZED[name]
            sizes, named = pytree.tree_map_only(Tensor, self._number, (args[at:], named))
            args = (*args[:at], *sizes)
        return func(*args, **named)

    def _number(self, size: Tensor) -> Any:
        """A constant whole number as Python's; any other tensor as it is."""
        is_whole = size.dim() == 0 and not (size.is_floating_point() or size.is_complex())
        found = self._values(size) if is_whole else None
        if found is None:
            return size
        with _outside():
            return found.item()

    def _indices(self, index: Tensor) -> Any:
        """A constant mask as the indices where it is true; any other index as it is."""
        found = self._values(index) if index.dtype is torch.bool and index.dim() else None
        if found is None:
            return index
        with _outside():
            return _Indices(found.nonzero(as_tuple=True))

    def _values(self, value: Any) -> Any:
        """`value` with real tensors; None if one of its tensors is no constant."""
        mode = get_proxy_mode()
        tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        if mode is None or not tensors:
            return None
        tracer: Any = mode.tracer
        names = {
            tracer.tensor_tracker[b].proxy.node: name
            for name, b in self._twin.named_buffers()
            if b in tracer.tensor_tracker
        }
        buffers: set[str] = set()
        known: dict[fx.Node, Any] = {}
        try:
            with _outside():
                for tensor in tensors:
                    if tensor in tracer.tensor_tracker:
                        node = tracer.tensor_tracker[tensor].proxy.node
                        self._compute(tracer.root, node, names, known, buffers)
                    elif isinstance(tensor, torch._subclasses.FakeTensor):
                        return None
        except _NoConstantError:
            return None
        self.buffers |= buffers

        def real(tensor: Tensor) -> Tensor:
            if tensor not in tracer.tensor_tracker:
                return tensor
            found: Tensor = known[tracer.tensor_tracker[tensor].proxy.node]
            return found

        return pytree.tree_map_only(Tensor, real, value)

    def _compute(
        self, root: Any, wanted: fx.Node, names: Mapping[fx.Node, str], known: dict[fx.Node, Any],
        buffers: set[str],
    ) -> None:  # fmt: skip
        """Compute a node and what it depends on."""
        waiting = [wanted]
        while waiting:
            node = waiting[-1]
            missing = [source for source in node.all_input_nodes if source not in known]
            if node in known or missing:
                waiting = waiting[:-1] if node in known else waiting + missing
                continue
            if any(map(_writes, node.users)):
                raise _NoConstantError
            if node in names:
                held = self._model.get_buffer(names[node])
                if held.is_meta:
                    raise _NoConstantError
                buffers.add(names[node])
                known[node] = held.detach().cpu()
            elif node.op == "get_attr":
                known[node] = getattr(root, str(node.target))
            elif node.op != "call_function" or _is_random(node):
                raise _NoConstantError
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                function: Any = node.target
                known[node] = function(*args, **kwargs)


class _NoConstantError(Exception):
    """A value depends on inputs, on parameters or on chance, or is written in place."""


class _Indices(tuple[Tensor, ...]):
    """The indices that stand for a mask, one for each of its dims."""


def _flat(index: Any) -> Any:
    """An index with the indices of masks in place of these."""
    if isinstance(index, _Indices):
        return tuple(index)
    if isinstance(index, tuple):
        return tuple(i for part in index for i in (part if isinstance(part, _Indices) else (part,)))
    return index


def _writes(node: fx.Node) -> bool:
    """May it change what it reads? `torch.tensor` detaches in place what it made."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable and node.target is not aten.detach_.default


def _is_random(node: fx.Node) -> bool:
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags


@contextmanager
def _outside() -> Iterator[None]:
    """Operators that run here are real, and no part of the trace."""
    with ExitStack() as stack:
        stack.enter_context(disable_proxy_modes_tracing())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(unset_fake_temporarily())
        stack.enter_context(torch.no_grad())
        yield
