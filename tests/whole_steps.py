"""Bytes of live tensors over whole training steps of an executor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.live_bytes import LiveBytes
from autopar.runtime.executor import Executor


def step_bytes(executor: Executor, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(peak over a step, the optimizer's included; between steps), once moments exist."""
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
    with LiveBytes([*stored.values(), *moments, *inputs.values()]) as live:
        between_bytes = live.live_bytes
        step()
    return live.peak_bytes, between_bytes
