"""Temporaries of each operator, and which gradients need no memory of their own.

Measured like `saved.py`: every operator runs once on fake tensors, forward and backward, while
`live_bytes.py` counts live storages:

    forward_bytes    peak during forward   - live bytes after it
    backward_bytes   peak during backward  - live bytes before it - gradients it returns
    passed           inputs whose gradient is, or views, an output's gradient

Both matter: a mean over the vocabulary makes a temporary as large as the logits, and an addition
passes its gradient on. If either is left out, the predicted peak is off by the largest tensor of
the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.measured.fake_calls import PerCall, as_list, fresh_like
from autopar.measured.live_bytes import LiveBytes
from autopar.program import Program
from autopar.rules import OpCall


@dataclass(frozen=True)
class Temporaries:
    """Temporaries of one operator for the program's global shapes.

    `passed` are positions in `OpCall.tensors`.
    """

    forward_bytes: int = 0
    backward_bytes: int = 0
    passed: frozenset[int] = frozenset()


def temporaries(program: Program, equal_calls: Mapping[str, str] = {}) -> dict[str, Temporaries]:
    """Operator node name -> its temporaries.

    `equal_calls` is that of `PerCall.of_all`. Raises `NotSupportedError` for an operator that does
    not run on fake tensors.
    """
    return _measured.of_all(program, program.operators, equal_calls)


def _measure(program: Program, node: torch.fx.Node, mode: FakeTensorMode) -> Temporaries:
    has_grad = node.name in program.has_grad
    assert callable(node.target)
    with mode:
        fakes = {source: fresh_like(program, source) for source in node.all_input_nodes}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fakes.__getitem__)
    leaves = [t for t in fakes.values() if t.requires_grad]
    # One counter for both directions: backward reads storages that only autograd holds.
    with mode, LiveBytes(fakes.values()) as live, torch.set_grad_enabled(has_grad):
        results = [r for r in as_list(node.target(*args, **kwargs)) if r is not None]
        forward_bytes = live.peak_bytes - live.live_bytes
        outputs = [r for r in results if r.requires_grad]
        if not outputs or not leaves:
            return Temporaries(forward_bytes)
        seeds = [torch.empty_like(r) for r in outputs]
        live.reset_peak()
        before_bytes = live.live_bytes
        gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    old = {t.untyped_storage()._cdata for t in (*leaves, *outputs, *seeds)}
    fresh = {
        g.untyped_storage()._cdata: g.untyped_storage().nbytes()
        for g in gradients
        if g is not None and g.untyped_storage()._cdata not in old
    }
    backward_bytes = max(0, live.peak_bytes - before_bytes - sum(fresh.values()))
    passing = _passing(leaves, gradients, seeds)
    inputs = (fakes[source] for source in OpCall.of_node(node).tensors)
    passed = frozenset(i for i, t in enumerate(inputs) if id(t) in passing)
    return Temporaries(forward_bytes, backward_bytes, passed)


_measured = PerCall(_measure, "its memory")


def _passing(
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    seeds: Sequence[torch.Tensor],
) -> set[int]:
    """Ids of the leaves whose gradient has the storage of one of `seeds`."""
    seeded = {s.untyped_storage()._cdata for s in seeds}
    return {
        id(leaf)
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and gradient.untyped_storage()._cdata in seeded
    }
