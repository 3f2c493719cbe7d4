"""Emits normalised nodes, each with its fake value, and tracks which ones carry gradient.

A rewrite receives a `TracedCall` (an operator with arguments already in the new graph) and emits
its replacement through the `Builder`.

Parameters that require grad carry gradient. So does a floating result of an operator with such an
input, unless the operator's derivative is zero everywhere by definition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.capture.findings import Findings
from autopar.capture.names import result_name, source_line
from autopar.capture.trace import REGION, SEEDED
from autopar.errors import NotSupportedError
from autopar.operators import function_of, seed_tensor
from autopar.precision import no_autocast

aten = torch.ops.aten

# Autograd cuts the results of these off from their inputs. But for `detach`, they read only the
# shape and dtype of their input.
CUTS_GRADIENT = frozenset(
    {
        aten.detach,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.empty_like,
        aten.rand_like,
        aten.randn_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.new_empty,
    }
)
# Operators of which only the results at these positions are differentiable.
DIFFERENTIABLE_RESULTS = {
    aten._native_batch_norm_legit_functional: frozenset({0}),
}


def is_differentiable(value: torch.Tensor) -> bool:
    """Can a tensor of this dtype carry gradient?"""
    return value.is_floating_point() or value.is_complex()


def carries_gradient(node: fx.Node, value: Any, has_grad: Container[fx.Node]) -> bool:
    """Does any result of `node` carry gradient, given the nodes that do (`has_grad`)?"""
    if getattr(node.target, "overloadpacket", None) in CUTS_GRADIENT:
        return False
    function = function_of(str(node.target))
    if function is not None and not function.results.differentiable:
        return False
    if not any(source in has_grad for source in node.all_input_nodes):
        return False
    return any(
        isinstance(v, torch.Tensor) and is_differentiable(v) for v in pytree.tree_leaves(value)
    )


def result_carries_gradient(node: fx.Node, index: int) -> bool:
    """Does result `index` of `node` carry gradient, given that `node` does and it is floating?"""
    assert isinstance(node.target, torch._ops.OpOverload)
    function = function_of(str(node.target))
    if function is not None:
        return index in function.results.differentiable
    return index in DIFFERENTIABLE_RESULTS.get(node.target.overloadpacket, (index,))


aten = torch.ops.aten
COPIED_META = ("nn_module_stack", "stack_trace", REGION)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TracedCall:
    """One operator call of the traced graph; `args` and `kwargs` hold nodes of the new graph."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: fx.Node

    @staticmethod
    def of(node: fx.Node) -> TracedCall:
        """The call of a node of the new graph."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return TracedCall(node.target, node.args, dict(node.kwargs), node)

    def bind(self) -> dict[str, Any]:
        """Every argument by name, defaults filled in (export drops trailing defaults)."""
        bound = {}
        for i, argument in enumerate(self.target._schema.arguments):
            if i < len(self.args):
                bound[argument.name] = self.args[i]
            elif argument.name in self.kwargs:
                bound[argument.name] = self.kwargs[argument.name]
            else:
                bound[argument.name] = argument.default_value
        return bound

    def change(self, **values: Any) -> None:
        """Give the node `origin` other values of some arguments; the others stay."""
        bound, arguments = self.bind() | values, self.target._schema.arguments
        positional = [a.name for a in arguments if not a.kwarg_only]
        given = {*positional[: len(self.args)], *self.kwargs, *values}
        n_given = max((i + 1 for i, name in enumerate(positional) if name in given), default=0)
        self.origin.args = tuple(bound[name] for name in positional[:n_given])
        self.origin.kwargs = {n: bound[n] for n in bound if n in given and n not in positional}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the traced result."""
        return tuple(self.origin.meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the traced result."""
        found: torch.dtype = self.origin.meta["val"].dtype
        return found


@dataclass
class Builder:
    """The graph being built.

    divisors    counts of labels that divide a mean; they must not depend on parameters, and
                move to the prologue
    constants   placeholders of constants that rewrites introduced, and what computes them
    restrided   nodes whose strides are not those of the trace; the fake values of operators that
                read them are computed anew
    """

    mode: FakeTensorMode
    findings: Findings = field(default_factory=Findings)
    graph: fx.Graph = field(default_factory=fx.Graph)
    has_grad: set[fx.Node] = field(default_factory=set)
    divisors: set[fx.Node] = field(default_factory=set)
    constants: dict[fx.Node, Callable[[], torch.Tensor]] = field(default_factory=dict)
    restrided: set[fx.Node] = field(default_factory=set)
    random_seed: fx.Node | None = None
    n_random: int = 0
    grad_enabled: bool = True
    origin: fx.Node | None = None
    _detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def placeholder(
        self, name: str, value: torch.Tensor, requires_grad: bool = False,
        dtype: torch.dtype | None = None,
    ) -> fx.Node:  # fmt: skip
        """A placeholder like `value`, in `dtype` if given."""
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty_strided(
                tuple(value.shape), value.stride(), dtype=dtype or value.dtype,
                device=_CPU,
            )  # fmt: skip
        if requires_grad:
            self.has_grad.add(node)
        return node

    def constant(self, name: str, compute: Callable[[], torch.Tensor]) -> fx.Node:
        """A new placeholder for a constant; constants with the same `compute` share one tensor."""
        node = self.placeholder(name, compute())
        self.constants[node] = compute
        return node

    def seed(self) -> fx.Node:
        """The placeholder of the step's seed (`operators/random.py`), for a draw at `origin`."""
        if self.origin is not None and SEEDED in self.origin.meta:
            raise NotSupportedError(
                "random numbers after forward set torch's generator (torch.manual_seed), which "
                "those of a step do not follow",
                where=source_line(self.origin),
                hint="draw what every step shall share before training, and keep it in a buffer",
            )
        if self.random_seed is None:
            self.random_seed = self.placeholder("seed", seed_tensor(0))
        return self.random_seed

    def next_occurrence(self) -> int:
        """A new number for a random operator."""
        self.n_random += 1
        return self.n_random - 1

    def getitem(self, value: Any, index: int) -> Any:
        """`value[index]`; `value` is a multi-output node, or a tuple from an inlined region."""
        if not isinstance(value, fx.Node):
            return value[index]
        if value.meta["val"][index] is None:
            return None
        name = result_name(value, index)
        node = self.graph.create_node("call_function", operator.getitem, (value, index), name=name)
        result = value.meta["val"][index]
        has_grad = value in self.has_grad and result_carries_gradient(value, index)
        return self._finish(node, result, has_grad and is_differentiable(result))

    def op(self, target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit an operator and compute its fake value."""
        return self.emit(target, args, kwargs)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node in a dtype: itself if it has that."""
        if node.meta["val"].dtype == dtype:
            return node
        return self.op(torch.ops.aten.to.dtype, node, dtype)

    def emit(
        self,
        target: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        same_as: fx.Node | None = None,
    ) -> fx.Node:
        """Emit an operator.

        same_as    the traced node, if the operator is unchanged: its fake value is reused
        """
        args, kwargs = pytree.tree_map(self._argument, (args, kwargs))
        if same_as is not None and not self._reads_restrided(args, kwargs):
            value = same_as.meta["val"]
        else:
            value = self.value_of(target, args, kwargs)
        if _is_factory(target, args, kwargs) and isinstance(value, torch.Tensor):
            # The default dtype may differ when the program runs.
            kwargs = kwargs | {"dtype": value.dtype}
        node = self._create(target, args, kwargs)
        if same_as is not None and _strides(value) != _strides(same_as.meta["val"]):
            self.restrided.add(node)
        return self._finish(node, value, carries_gradient(node, value, self.has_grad))

    def _reads_restrided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self.restrided:
            return False
        leaves = pytree.tree_leaves((args, kwargs))
        return any(isinstance(v, fx.Node) and v in self.restrided for v in leaves)

    def _create(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        name = target.overloadpacket.__name__.strip("_")
        return self.graph.create_node("call_function", target, args, kwargs, name=name)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CPU  # traces of meta or cuda models bake their device in
        if isinstance(value, fx.Node) and not self.grad_enabled and value in self.has_grad:
            return self.detach(value)
        return value

    def detach(self, node: fx.Node) -> fx.Node:
        """`node` without gradient; one detached node per node."""
        if node not in self._detached:
            detached = self._create(aten.detach.default, (node,), {})
            self._detached[node] = self._finish(detached, node.meta["val"], False)
        return self._detached[node]

    def _finish(self, node: fx.Node, value: Any, has_grad: bool) -> fx.Node:
        node.meta["val"] = value
        if self.origin is not None:
            node.meta |= {k: self.origin.meta[k] for k in COPIED_META if k in self.origin.meta}
        if has_grad:
            self.has_grad.add(node)
        return node

    def value_of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fake result of an operator on the fake values of its operands."""
        fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad(), no_autocast():
            return target(*fakes[0], **fakes[1])


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [v.stride() for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _is_factory(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if any(isinstance(v, fx.Node) for v in pytree.tree_leaves((args, kwargs))):
        return False
    return any(a.name == "dtype" for a in target._schema.arguments)
