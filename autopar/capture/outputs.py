"""Finds the loss and the tensors in the structure that the model returns.

The loss is the result of `loss_fn`, if there is one. Else it is, in this order:

    the output itself, its attribute `.loss` or its key "loss", if it is a floating 0-d tensor
    its first element, if it is one that carries gradient
    the only floating 0-d tensor with gradient anywhere in the output, as in `(logits, loss)`

An output whose `.loss` or "loss" is None has no loss, whatever else it holds.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import CaptureError

_HINT = "return the loss from the model (pass labels), or give loss_fn=(outputs, batch) -> loss"


@dataclass(frozen=True)
class Outputs:
    """The model's outputs.

    tensors    the leaves of `spec` that are tensors, in order
    static     position of a leaf -> its value, for the other leaves
    """

    loss: fx.Node | None
    tensors: tuple[fx.Node, ...]
    static: Mapping[int, Any]
    spec: pytree.TreeSpec

    @property
    def all(self) -> tuple[fx.Node, ...]:
        return self.tensors if self.loss is None else (self.loss, *self.tensors)


def read_outputs(
    model: nn.Module,
    leaves: tuple[Any, ...],
    spec: pytree.TreeSpec,
    has_grad: Container[fx.Node],
    training: bool,
    has_loss_fn: bool,
) -> Outputs:
    """The outputs of a traced model, given the leaves of the traced result.

    Raises `CaptureError` if the loss is not a scalar, or if training has no loss with gradient or
    several results that could be it.
    """
    name = type(model).__name__
    if has_loss_fn:
        loss: fx.Node | None = leaves[0]
        if not _is_scalar(loss):
            raise CaptureError(
                f"loss_fn of {name} returned {_describe(loss)}, not a scalar",
                hint=_hint_of(leaves[:1], "return the loss of the batch: .mean() or .sum()"),
            )
        leaves, spec = leaves[1:], spec.children()[1]
    else:
        loss = _find_loss(leaves, spec)
        is_lost = loss is None or (loss not in has_grad and len(leaves) > 1)
        if is_lost and not _says_no_loss(leaves, spec):
            loss = _only_scalar(name, leaves, has_grad, training) or loss
    if training and loss is None:
        described = ", ".join(_describe(leaf) for leaf in leaves)
        raise CaptureError(
            f"{name} returns no scalar loss, but: {described}", hint=_hint_of(leaves, _HINT)
        )
    if training and loss not in has_grad:
        raise CaptureError(
            f"the loss of {name} depends on no trainable parameter",
            hint="check requires_grad, torch.no_grad() and detach() on the way to the loss",
        )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))
    static = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, fx.Node)}
    return Outputs(loss, tensors, static, spec)


def _rebuilt(leaves: tuple[Any, ...], spec: pytree.TreeSpec) -> tuple[Any, list[Any]]:
    """The output with a meta tensor for each value of the graph, and its leaves, the same way."""
    stand_ins = [
        torch.empty((), device="meta") if isinstance(leaf, fx.Node) else leaf for leaf in leaves
    ]
    return pytree.tree_unflatten(stand_ins, spec), stand_ins


def _find_loss(leaves: tuple[Any, ...], spec: pytree.TreeSpec) -> fx.Node | None:
    """The loss by its place in the output."""
    output, stand_ins = _rebuilt(leaves, spec)
    for candidate in _candidates(output):
        for leaf, stand_in in zip(leaves, stand_ins, strict=True):
            if candidate is stand_in and _is_scalar(leaf):
                return leaf
    return None


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model returned, found as `read_outputs` does; None if there is none."""
    found: torch.Tensor | None = next(filter(_is_scalar, _candidates(output)), None)
    if found is not None and found.requires_grad:
        return found
    has_named = hasattr(output, "loss") or (isinstance(output, Mapping) and "loss" in output)
    others = [
        leaf for leaf in pytree.tree_leaves(output) if _is_scalar(leaf) and leaf.requires_grad
    ]
    return others[0] if len(others) == 1 and not has_named else found


def _candidates(output: Any) -> list[Any]:
    """Where a model may return its loss."""
    found = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        found.append(output.get("loss"))
    elif isinstance(output, (tuple, list)):
        found += output[:1]
    return found


def _says_no_loss(leaves: tuple[Any, ...], spec: pytree.TreeSpec) -> bool:
    """Does the output name a loss, which then is none?"""
    output, _ = _rebuilt(leaves, spec)
    return hasattr(output, "loss") or (isinstance(output, Mapping) and "loss" in output)


def _only_scalar(
    name: str, leaves: tuple[Any, ...], has_grad: Container[fx.Node], training: bool
) -> fx.Node | None:
    """The only scalar with gradient; raises `CaptureError` in training if there are more."""
    places = {leaf: i for i, leaf in enumerate(leaves) if _is_scalar(leaf) and leaf in has_grad}
    if len(places) > 1 and training:
        listed = ", ".join(f"result {i}" for i in places.values())
        raise CaptureError(
            f"{name} returns {len(places)} scalars that could be the loss: {listed}",
            hint='say which one: loss_fn=(outputs, batch) -> loss, or return it first or as "loss"',
        )
    return next(iter(places)) if len(places) == 1 else None


def _is_scalar(leaf: Any) -> bool:
    value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _hint_of(leaves: tuple[Any, ...], otherwise: str) -> str:
    """What to do about results of which none is a scalar."""
    values = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, fx.Node)]
    if len(values) == 1 and values[0].numel() == 1 and values[0].is_floating_point():
        return "a loss has no dims: return it with .squeeze() or .mean()"
    return otherwise


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, fx.Node):
        return repr(leaf)
    value = leaf.meta["val"]
    return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
