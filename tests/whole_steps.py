"""Bytes of live tensors over whole training steps of an executor."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.live_bytes import LiveBytes
from autopar.runtime.executor import Executor

# Gloo's threads hold what a collective read and wrote for a moment after it is done.
LET_GO_S = 0.002
N_STEPS = 2


class _Settled(LiveBytes):
    """Counts once what a collective was given has been let go."""

    _is_settled = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not self._is_settled:
            time.sleep(LET_GO_S)
        self._is_settled = func.namespace != "c10d"
        return super().__torch_dispatch__(func, types, args, kwargs)


def step_bytes(executor: Executor, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(peak over a step, the optimizer's included; between steps), once moments exist: the less
    of two steps where there are several ranks."""
    inputs = dict(inputs)
    stored = {
        p.name: (torch.randn(p.stored.shape) * 0.02).requires_grad_()
        for p in executor.program.parameters
    }
    optimizer = torch.optim.AdamW(stored.values(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        executor.step(stored, inputs)
        optimizer.step()

    step()
    optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    peaks = []
    with _Settled([*stored.values(), *moments, *inputs.values()]) as live:
        between_bytes = live.live_bytes
        for _ in range(N_STEPS if executor.pipeline.n_ranks > 1 else 1):
            live.reset_peak()
            step()
            optimizer.zero_grad()
            peaks.append(live.peak_bytes)
    return min(peaks), between_bytes
