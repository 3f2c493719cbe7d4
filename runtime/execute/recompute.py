"""Segments of a generated program that run again in backward, so that less is saved.

    forward     the segment runs; autograd saves its inputs and the results of `kept`
    backward    the first operator that needs a discarded tensor starts the segment again, up to
                the last such tensor; `kept` returns its saved results

`torch.utils.checkpoint` implements this. Random numbers are a function of where they are drawn
(`autopar/operators/random.py`), so the second run draws the same ones without any saved
generator state. All ranks of a stage run the same graph, so they repeat its collectives in the
same order. Those count as phase "backward"; gathers of parameters keep their own phase.

The second run still calls a kept operator, so that autograd saves its inputs as before. A
dispatch mode returns the saved result instead of running the kernel. Torch's selective contexts
do the same, but for all calls, not only for marked ones. A reshard saves nothing for backward,
so its saved result becomes a leaf. If only kept reshards read the result of a matmul, that
result is not saved: the second run returns uninitialised memory of its shape.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from autopar.operators import ATTENTION_DROPOUT_KERNEL
from autopar.runtime.groups import RankContext, current_context, phase

# The kernels that matmuls and attention dispatch to.
_KEPT = {
    *flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    ATTENTION_DROPOUT_KERNEL,
}

Segment = Callable[..., Any]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Kept(TorchDispatchMode):
    """The kept results of one segment, in order: saved on the first run, returned on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.results: deque[Any] = deque()
        self.hands_out = False
        self.marked: Callable[..., Any] | None = None
        self.keeps_values = True

    def of_operator(
        self, operator: Callable[..., Any], args: Any, kwargs: Any, keeps_values: bool
    ) -> Any:
        self.marked, self.keeps_values = operator, keeps_values
        with self:
            return operator(*args, **kwargs)

    def of_reshard(self, move: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        if self.hands_out:
            kept, has_grad = self.results.popleft()
            return kept.requires_grad_(has_grad)
        result = move(*args, **kwargs)
        self.results.append((result.detach(), result.requires_grad))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # aten.matmul, say, dispatches views around one matmul kernel; the kernel is kept.
        if func is not self.marked and func.overloadpacket not in _KEPT:
            return func(*args, **(kwargs or {}))
        if self.hands_out:
            kept = self.results.popleft()
            return kept() if isinstance(kept, partial) else kept
        result = func(*args, **(kwargs or {}))
        if not self.keeps_values:
            size, stride, dtype = result.shape, result.stride(), result.dtype
            make = partial(torch.empty_strided, size, stride, dtype=dtype, device=result.device)
            self.results.append(make)
            return result
        # Detached: the graph holds this copy, so a copy with history would be a cycle.
        self.results.append(pytree.tree_map_only(Tensor, Tensor.detach, result))
        return result


class Recompute:
    """Runs segments; one per executor."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def recomputed(
        self, segment: Segment, inputs: tuple[Tensor, ...], stops_early: bool, keeps: bool
    ) -> Any:
        """The results of `segment`, which runs again in backward.

        `stops_early`: the second run ends after the last tensor that autograd needs. `keeps`: the
        segment calls `kept`.
        """
        if not torch.is_grad_enabled():
            return segment(*inputs)
        rank = current_context()

        def contexts() -> Contexts:
            if not keeps:
                return nullcontext(), phase("backward", rank)
            kept = _Kept()
            return self._keeping(kept), self._handing_out(kept, rank)

        return checkpoint(
            segment, *inputs, use_reentrant=False, preserve_rng_state=False,
            context_fn=contexts, early_stop=stops_early,
        )  # fmt: skip

    def kept(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operator or a reshard, saved rather than recomputed."""
        if self._kept is None:
            return function(*args, **kwargs)
        if isinstance(function, torch._ops.OpOverload):
            return self._kept.of_operator(function, args, kwargs, keeps_values=True)
        return self._kept.of_reshard(function, args, kwargs)

    def handed_on(self, matmul: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a matmul that only kept calls read; on the second run it has no values."""
        if self._kept is None:
            return matmul(*args, **kwargs)
        return self._kept.of_operator(matmul, args, kwargs, keeps_values=False)

    @contextmanager
    def _keeping(self, kept: _Kept) -> Iterator[None]:
        before, self._kept = self._kept, kept
        try:
            yield
        finally:
            self._kept = before

    @contextmanager
    def _handing_out(self, kept: _Kept, rank: RankContext) -> Iterator[None]:
        kept.hands_out = True
        with self._keeping(kept), phase("backward", rank):
            yield
