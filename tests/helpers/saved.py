"""Programs of single operators, and what autograd saves of them on real tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autopar.measured import Saved, saved_for_backward
from autopar.program.graph import Program


class Draft:
    """A program written by hand, operator by operator."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.has_grad: set[str] = set()

    def leaf(self, real: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty_strided(
                real.shape, real.stride(), dtype=real.dtype, device="cpu"
            )
        return self._mark(node, real.requires_grad)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        plain = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*plain[0], **plain[1])
        values = pytree.tree_leaves(node.meta["val"])
        is_smooth = any(v.is_floating_point() or v.is_complex() for v in values)
        return self._mark(
            node, is_smooth and any(n.name in self.has_grad for n in node.all_input_nodes)
        )

    def _mark(self, node: fx.Node, grad: bool) -> fx.Node:
        if grad:
            self.has_grad.add(node.name)
        return node

    def program(self, *outputs: fx.Node) -> Program:
        self.graph.output(outputs)
        return Program(
            graph=self.graph,
            parameters={},
            buffers={},
            inputs={},
            constants={},
            prologue=None,
            loss=None,
            outputs=tuple(n.name for n in outputs),
            out_spec=pytree.tree_structure(tuple(outputs)),
            has_grad=frozenset(self.has_grad),
            keys={},
            sources={},
        )


def saved_of(op: Any, *args: Any, **kwargs: Any) -> Saved:
    """What the module says of one call; a tensor that is passed twice is one node."""
    draft = Draft()
    nodes: dict[int, fx.Node] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in nodes:
            nodes[id(value)] = draft.leaf(value)
        return nodes[id(value)]

    args, kwargs = pytree.tree_map(leaf, (args, kwargs))
    node = draft.call(op, *args, **kwargs)
    return saved_for_backward(draft.program(node))[node.name]


def really_saved(op: Any, *args: Any, **kwargs: Any) -> Saved:
    """What autograd keeps of one call on real tensors, told apart by address."""
    packed: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed[address(tensor)] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        results = op(*args, **kwargs)
    inputs = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    outputs = pytree.tree_leaves(results)
    in_places, out_places = [address(t) for t in inputs], [address(t) for t in outputs]
    return Saved(
        frozenset(i for i, place in enumerate(in_places) if place in packed),
        frozenset(i for i, p in enumerate(out_places) if p in packed and p not in in_places),
        sum(
            tensor.untyped_storage().nbytes()
            for place, tensor in packed.items()
            if place not in in_places + out_places
        ),
    )


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
