"""Decomposes composite operators by one level, into a graph of their parts (`decomposition`).

Some operators are composed by torch of differentiable ones (`CompositeImplicitAutograd`:
`movedim`, `outer`, `fft_fftn`, `gru`). They need no rule, because their parts have rules. A few
others have a decomposition in torch's tables that computes the same as their kernel
(`PYTHON_DECOMPOSITIONS`), and so have derivatives (`derivatives.py`).

Three kinds of operators are kept whole. An operator with a rule: its rule knows more than the rules
of its parts. An operator with parts that run under a no-grad guard of the C++ code: in the graph
these parts would look differentiable. And `autograd.Function`s, for their own backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.builder import Builder, TracedCall, is_differentiable
from autopar.capture.inplace import functionalise
from autopar.capture.rewrites.derivatives import derivative
from autopar.capture.trace import GRAD_ENABLED, REGION, SEEDED
from autopar.operators import function_of
from autopar.rules import own_rule

aten = torch.ops.aten

PYTHON_DECOMPOSITIONS = frozenset(
    {
        aten._weight_norm_interface.default,
        aten.addr.default,
        aten.block_diag.default,
        aten.channel_shuffle.default,
        aten.glu.default,
        # Kernels of composites, which derivatives in forward read.
        aten._native_batch_norm_legit.no_stats,
        aten._unsafe_index_put.default,
        aten.log_sigmoid_forward.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
        aten.nll_loss2d_forward.default,
        aten.nll_loss_forward.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.rot90.default,
        aten.take.default,
    }
)
_INHERITED_META = ("nn_module_stack", "stack_trace", GRAD_ENABLED, REGION, SEEDED)


def decomposition(b: Builder, call: TracedCall) -> tuple[fx.Graph, list[fx.Node]] | None:
    """The graph of the parts of `call`, and the tensors that `call` reads, in order.

    None if the operator has a rule of its own or cannot be decomposed.
    """
    name = str(call.target)
    is_whole = own_rule(name) or function_of(name)
    function = None if is_whole else _function(call.target)
    if function is None:
        return None
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    traced = pytree.tree_leaves((call.origin.args, call.origin.kwargs))
    read = [
        (leaf, like if isinstance(like, fx.Node) else leaf)
        for leaf, like in zip(leaves, traced, strict=True)
        if isinstance(leaf, fx.Node)
    ]
    watch = _NoGradWatch()

    def run(*tensors: torch.Tensor) -> list[Any]:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        # Tracing intercepts torch functions, but this call must run, not be recorded.
        with torch._C.DisableTorchFunction(), watch:
            return pytree.tree_leaves(function(*args, **kwargs))

    try:
        graph = _parts_graph(b, run, read)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None
    if watch.seen or any(n.op == "get_attr" or n.target == call.target for n in graph.nodes):
        return None
    for node in [n for n in graph.nodes if n.op == "call_function" and "val" not in n.meta]:
        if not node.users:  # it asks for a dtype
            graph.erase_node(node)
    functionalise(graph, {}, ())
    for node in graph.nodes:
        node.meta |= {k: call.origin.meta[k] for k in _INHERITED_META if k in call.origin.meta}
    return graph, [source for source, _ in read]


def _function(target: torch._ops.OpOverload) -> Callable[..., Any] | None:
    if target in PYTHON_DECOMPOSITIONS:
        return decomposition_table[target]
    found = derivative(target)
    if found is not None:
        return found
    name = target._schema.name.removeprefix("aten::")
    if name.endswith("_copy") and own_rule(f"aten.{name[:-5]}.{target._overloadname}"):
        return getattr(getattr(aten, name[:-5]), target._overloadname)  # a view will do
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    if composite in target.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
        target.name(), "CompositeImplicitAutograd"
    ):
        return target.decompose
    return None


def _parts_graph(
    b: Builder, run: Callable[..., Any], read: Sequence[tuple[fx.Node, fx.Node]]
) -> fx.Graph:
    """The graph of `run` on tensors like those it reads.

    All require gradient, because without it torch may choose forward-only kernels, which have no
    derivative. Where an argument has no derivative (a scale), only those do that have it anyway.
    """
    try:
        return _record(b, run, read, [is_differentiable(n.meta["val"]) for n, _ in read])
    except RuntimeError as error:
        if "not differentiable with respect to" not in str(error):
            raise
    return _record(b, run, read, [n in b.has_grad for n, _ in read])


def _record(
    b: Builder, run: Callable[..., Any], read: Sequence[tuple[fx.Node, fx.Node]],
    requires_grad: Sequence[bool],
) -> fx.Graph:  # fmt: skip
    with b.mode, torch.enable_grad():
        tensors = [
            _tensor_like(*pair).requires_grad_(needed)
            for pair, needed in zip(read, requires_grad, strict=True)
        ]
        graph: fx.Graph = make_fx(run, pre_dispatch=True)(*tensors).graph
    return graph


def _tensor_like(source: fx.Node, traced: fx.Node) -> torch.Tensor:
    """A tensor like `source`, with the strides of the trace: copies (`contiguous()`) were removed
    since, and some composites fail on other strides (`kron`).
    """
    value, strides = source.meta["val"], traced.meta["val"].stride()
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


class _NoGradWatch(TorchDispatchMode):
    """Records whether any operator runs with gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.seen |= not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))
