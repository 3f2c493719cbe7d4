"""Temporaries of each operator, and which gradients need no memory of their own.

Measured like `saved.py`: every operator runs once on fake tensors, forward and backward, while
`live_bytes.py` counts live storages:

    forward_bytes    peak during forward   - live bytes after it
    backward_bytes   peak during backward  - live bytes before it - gradients it returns
    passed           inputs whose gradient is, or views, an output's gradient

In backward a temporary lives from the kernel that makes it to the last one that reads it, because
each kernel is a line of the program (`passes/backward`). Both matter: a mean over the vocabulary
makes a temporary as large as the logits, and an addition passes its gradient on. If either is left
out, the predicted peak is off by the largest tensor of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.measured.fake_calls import PerCall, as_list, fresh_like
from autopar.measured.live_bytes import LiveBytes
from autopar.operators import workspace_bytes
from autopar.program.graph import Program
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
        with _Kernels() as kernels:
            gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    backward_bytes = kernels.temporary_bytes([g for g in gradients if g is not None])
    passing = _passing(leaves, gradients, seeds)
    inputs = (fakes[source] for source in OpCall.of_node(node).tensors)
    passed = frozenset(i for i, t in enumerate(inputs) if id(t) in passing)
    return Temporaries(forward_bytes, backward_bytes, passed)


_measured = PerCall(_measure, "its memory")


class _Kernels(TorchDispatchMode):
    """The storages that kernels read and make, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._last_read: dict[int, int] = {}
        self._made: dict[int, tuple[int, int]] = {}  # storage -> kernel that makes it, bytes
        self._inner_bytes: list[int] = []
        self._alive: list[Any] = []  # so that no two storages have one identity

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        n, result = len(self._inner_bytes), func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._last_read[_storage(tensor)] = n
        read = {storage for storage, at in self._last_read.items() if at == n}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _storage(tensor) not in read:
                self._made.setdefault(_storage(tensor), (n, tensor.untyped_storage().nbytes()))
        self._inner_bytes.append(workspace_bytes(func, args))
        self._alive.append((args, kwargs, result))
        return result

    def temporary_bytes(self, results: Sequence[torch.Tensor]) -> int:
        """The most bytes alive at once besides `results`, all of which are there at the end."""
        kept = {_storage(tensor) for tensor in results}
        peak = 0
        for n, inner_bytes in enumerate(self._inner_bytes):
            live = sum(
                size_bytes
                for storage, (made, size_bytes) in self._made.items()
                if made <= n and (storage in kept or self._last_read.get(storage, made) >= n)
            )
            peak = max(peak, live + inner_bytes)
        return max(0, peak - sum(b for s, (_, b) in self._made.items() if s in kept))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _passing(
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    seeds: Sequence[torch.Tensor],
) -> set[int]:
    """Ids of the leaves whose gradient has the storage of one of `seeds`."""
    seeded = {_storage(s) for s in seeds}
    return {
        id(leaf)
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and _storage(gradient) in seeded
    }
