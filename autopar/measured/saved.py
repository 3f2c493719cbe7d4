"""What autograd saves from the forward of each operator for its backward.

Measured, not listed: every operator runs once, on fake tensors with the program's shapes, strides
and `requires_grad`. Each tensor that autograd packs has one of these storages:

    storage of an input     saved input      (also for views of it, transposed or cut)
    storage of an output    saved output     (unless it is also that of an input)
    any other               other_bytes      mean and rstd of a layer norm, logsumexp of attention,
                                             log-softmax of a cross-entropy, masks of dropout

    activation bytes = Σ over distinct storages of saved inputs and outputs, without parameters,
                       + Σ other_bytes                                       (`activation_bytes`)

A storage counts once, however many operators save it: `storage_owners` says which values share
one. Operators decompose as they do on the device of the fake tensors.

One fake kernel is known to be wrong (torch 2.13, compared with real runs): a layer norm of bf16 or
fp16 activations with float32 scales saves float32 statistics on CPU, which count as half as large.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from autopar.measured.fake_calls import PerCall, as_list, fresh_like
from autopar.program.graph import Program
from autopar.rules import OpCall


@dataclass(frozen=True)
class Saved:
    """What one operator saves for its backward.

    `inputs` are positions in `OpCall.tensors` (a tensor that is passed twice has two), `outputs`
    are positions in `OpCall.outputs`. `other_bytes` are for the program's global shapes.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    other_bytes: int = 0


_NOTHING = Saved()


@dataclass(frozen=True)
class _Effect:
    """`shares[i]`: position in `Node.all_input_nodes` of the input that result i views, or None."""

    saved: Saved
    shares: tuple[int | None, ...]


def saved_for_backward(program: Program, equal_calls: Mapping[str, str] = {}) -> dict[str, Saved]:
    """Operator node name -> what it saves; operators without gradient save nothing.

    `equal_calls` is that of `PerCall.of_all`. Raises `NotSupportedError` for an operator that does
    not run on fake tensors.
    """
    operators = list(program.operators)
    with_grad = (node for node in operators if node.name in program.has_grad)
    effects = _effects.of_all(program, with_grad, equal_calls)
    return {o.name: effects[o.name].saved if o.name in effects else _NOTHING for o in operators}


def storage_owners(program: Program, equal_calls: Mapping[str, str] = {}) -> dict[str, str]:
    """Tensor name -> name of the tensor that owns its storage: itself, unless it is a view.

    `equal_calls` is that of `PerCall.of_all`. Raises `NotSupportedError` for an operator that does
    not run on fake tensors.
    """
    effects = _effects.of_all(program, program.operators, equal_calls)
    owners: dict[str, str] = {}
    for node in program.graph.nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # the output node, and tuples, whose tensors are `getitem` nodes
        source, position = node.args if node.target is operator.getitem else (node, 0)
        owner = _result_name(source, position)
        if source.op == "call_function":
            shared = effects[source.name].shares[position]
            if shared is not None:
                owner = owners[source.all_input_nodes[shared].name]
        owners[node.name] = owner
    return owners


def activation_bytes(program: Program) -> int:
    """Bytes that the unsharded program saves for its backward, without parameters."""
    owners = storage_owners(program)
    first: dict[Any, str] = {}  # constants that one function makes are one tensor
    same = {name: first.setdefault(make, name) for name, make in program.constants.items()}
    kept_bytes: dict[str, int] = {}
    other_bytes = 0
    for name, saved in saved_for_backward(program).items():
        node = program.node(name)
        tensors = OpCall.of_node(node).tensors
        for owner in (owners[tensors[i].name] for i in saved.inputs):
            owner = same.get(owner, owner)
            kept_bytes[owner] = _storage_bytes(program.node(owner).meta["val"])
        results = [(i, r) for i, r in enumerate(as_list(node.meta["val"])) if r is not None]
        for i, result in (results[k] for k in saved.outputs):
            kept_bytes[_result_name(node, i)] = _storage_bytes(result)
        other_bytes += saved.other_bytes
    return other_bytes + sum(
        size_bytes for name, size_bytes in kept_bytes.items() if name not in program.parameters
    )


def _result_name(node: torch.fx.Node, position: int) -> str:
    """The name of one result: the node's, or that of the first `getitem` that reads it."""
    if isinstance(node.meta["val"], torch.Tensor):
        return node.name
    takers = (u.name for u in node.users if u.target is operator.getitem and u.args[1] == position)
    return next(takers, f"{node.name}.{position}")


def _run(program: Program, node: torch.fx.Node, mode: FakeTensorMode) -> _Effect:
    """Run one operator on fresh fake tensors and record what autograd packs."""
    with mode:
        fakes = {source: fresh_like(program, source) for source in node.all_input_nodes}
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fakes.__getitem__)
    assert callable(node.target)
    has_grad = node.name in program.has_grad
    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    with mode, torch.set_grad_enabled(has_grad), hooks:
        result = node.target(*args, **kwargs)
    inputs = [fakes[source] for source in OpCall.of_node(node).tensors]
    results = as_list(result)
    # No two of the fakes share a storage.
    position = {_storage(t): i for i, t in enumerate(fakes.values())}
    shares = (None if r is None else position.get(_storage(r)) for r in results)
    return _Effect(_attribute(inputs, results, packed), tuple(shares))


_effects = PerCall(_run, "what it keeps for backward")


def _attribute(
    inputs: list[torch.Tensor], results: list[torch.Tensor | None], packed: list[torch.Tensor]
) -> Saved:
    """Sort the packed tensors by the owner of their storage."""
    in_storages = [_storage(t) for t in inputs]
    out_storages = [_storage(t) for t in results if t is not None]
    kept = {_storage(t): _storage_bytes(t) for t in packed}
    others = kept.keys() - {*in_storages, *out_storages}
    return Saved(
        frozenset(i for i, s in enumerate(in_storages) if s in kept),
        frozenset(i for i, s in enumerate(out_storages) if s in kept and s not in in_storages),
        sum(kept[s] for s in others),
    )


def _storage(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; valid while the tensor is alive."""
    return tensor.untyped_storage()._cdata


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
