"""What stands in a program for an operator and for its backward; found once for all equal calls.

whole      forward is the operator itself. Its backward reads arguments, results, and views of
           them, which it makes again
written    forward is the operator's kernels: backward reads what they make between, or the
           operator takes other kernels without gradient (a matmul that folds its rows)
taped      the operator runs under autograd, and hands on its graph (`runtime/lowered/tape.py`).
           For operators whose kernels can't be recorded: functions of the user
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar.operators import function_of
from autopar.passes.backward.recording import (
    Kernel,
    Meta,
    Recording,
    UntraceableError,
    record,
    run_on_fakes,
)

_MAX_KNOWN = 1 << 14
# The number of a random draw differs from layer to layer and changes nothing else: calls are
# recorded with this one, and get their own when they are printed.
OCCURRENCE = 0x0CC0_0CC0_0CC0


@dataclass(frozen=True)
class Call:
    """A call of an operator: `Slot(i)` stands for tensor i."""

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    metas: tuple[Meta, ...]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        # As text, because 1, 1.0 and True are equal as dictionary keys.
        return self.target, repr((self.args, dict(self.kwargs))), self.metas

    @property
    def operator(self) -> Callable[..., Any]:
        return operator_named(self.target)


@dataclass(frozen=True)
class Template:
    """How an operator and its backward run.

    forward    the kernels that replace the operator; None if it stays as it is
    kept       slots that forward makes and backward reads, without the operator's results
    again      kernels of forward that backward runs again: views of arguments and results
    copies     slots of forward that do not depend on a result
    """

    recording: Recording
    forward: tuple[Kernel, ...] | None
    kept: frozenset[int]
    again: tuple[Kernel, ...]
    copies: frozenset[int]

    @cached_property
    def read(self) -> frozenset[int]:
        """The slots that backward reads."""
        kernels = (*self.again, *self.recording.backward)
        return frozenset(slot for kernel in kernels for slot in kernel.reads)

    @cached_property
    def read_ahead(self) -> frozenset[int]:
        """The slots that the kernels of forward read, or hand on."""
        kernels = self.forward or ()
        return self.kept.union(slot for kernel in kernels for slot in kernel.reads)


def operator_named(target: str) -> Callable[..., Any]:
    """`aten.add.Tensor` -> the overload."""
    found: Any = torch.ops
    for word in target.split("."):
        found = getattr(found, word)
    operator: Callable[..., Any] = found
    return operator


def result_metas(call: Call) -> tuple[Meta | None, ...]:
    """What an operator returns."""
    key = ("results", *call.key)
    if key not in _known:
        _remember(key, tuple(run_on_fakes(call.operator, call.args, call.kwargs, call.metas)))
    found: tuple[Meta | None, ...] = _known[key]
    return found


def template(call: Call, gradients: Sequence[Meta | None]) -> Template | None:
    """How a call and its backward run, for such gradients of its results; None if taped."""
    key = ("template", *call.key, tuple(gradients))
    if key not in _known:
        _remember(key, _template(call, gradients))
    found: Template | None = _known[key]
    return found


def _template(call: Call, gradients: Sequence[Meta | None]) -> Template | None:
    if function_of(call.target) is not None:
        return None  # Python of the user's, which may look at values
    try:
        made = record(call.operator, call.args, call.kwargs, call.metas, gradients)
    except UntraceableError:
        return None
    n_inputs = len(call.metas)
    own = {*range(n_inputs), *(slot for slot in made.outs if slot is not None)}
    views: dict[int, Kernel] = {}
    for kernel in made.forward:
        if kernel.is_view and all(slot in own or slot in views for slot in kernel.reads):
            views |= {slot: kernel for slot in kernel.outs if slot is not None and slot not in own}
    inside = {slot for kernel in made.forward for slot in kernel.outs} - own - {None}
    read = {slot for kernel in made.backward for slot in kernel.reads}
    read |= {slot for slot in made.gradients if slot is not None}
    needed = {slot for slot in read if slot in inside}
    kept = frozenset(slot for slot in needed if slot is not None and slot not in views)
    again = _needed(made.forward, needed & views.keys(), frozenset(views))
    wanted = {slot for slot in made.outs if slot is not None} | kept
    is_written = bool(kept) or not _is_same_without_gradient(call, made)
    forward = _needed(made.forward, wanted, None) if is_written else None
    return Template(made, forward, kept, again, _copies(made))


def _is_same_without_gradient(call: Call, made: Recording) -> bool:
    """Does the operator run the recorded kernels without gradient, too?"""
    if [kernel.target for kernel in made.forward] == [call.operator]:
        return True
    metas = [meta._replace(has_grad=False) for meta in call.metas]
    nothing = [None] * len(made.outs)
    return record(call.operator, call.args, call.kwargs, metas, nothing).forward == made.forward


def _copies(made: Recording) -> frozenset[int]:
    """The slots of forward that neither a kernel with a result makes, nor what depends on one."""
    makers = {slot: kernel for kernel in made.forward for slot in kernel.outs}
    results: set[int | None] = set()
    for slot in made.outs:
        while slot in makers:
            kernel = makers[slot]
            results |= set(kernel.outs)
            slot = kernel.reads[0] if kernel.is_view else None
    found: set[int] = set()
    for kernel in made.forward:
        if results.isdisjoint((*kernel.outs, *kernel.reads)):
            found |= {slot for slot in kernel.outs if slot is not None}
        else:
            results |= set(kernel.outs)
    return frozenset(found)


def _needed(
    kernels: Sequence[Kernel], wanted: set[Any], among: frozenset[int] | None
) -> tuple[Kernel, ...]:
    """The kernels that make `wanted`, in order; only those that make slots of `among`, if given."""
    needed, found = set(wanted), []
    for kernel in reversed(kernels):
        mine = {slot for slot in kernel.outs if slot in needed}
        if mine and (among is None or mine <= among):
            found.append(kernel)
            needed |= set(kernel.reads)
    return tuple(reversed(found))


_known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def _remember(key: tuple[Any, ...], value: Any) -> None:
    _known[key] = value
    if len(_known) > _MAX_KNOWN:
        _known.popitem(last=False)
