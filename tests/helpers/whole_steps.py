"""Bytes of live tensors over whole training steps.

Worker processes are sent what they run (`WholeStep`): they need neither the model nor the planner.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.codegen import emit
from autopar.measured import LiveBytes
from autopar.passes.backward import differentiate
from autopar.program.graph import Program
from autopar.program.lines import Pipeline
from autopar.runtime.collectives import DistMessenger
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.groups import make_groups, world_group

# Gloo's threads hold what a collective read and wrote for a moment after it is done.
LET_GO_S = 0.002
N_STEPS = 2


class _Settled(LiveBytes):
    """Waits until the buffers of a collective are released before it counts."""

    _is_settled = True

    def __torch_dispatch__(self, func: Any, *call: Any, **named: Any) -> Any:
        if not self._is_settled:
            time.sleep(LET_GO_S)
        self._is_settled = func.namespace != "c10d"
        return super().__torch_dispatch__(func, *call, **named)


class WholeStep(NamedTuple):
    """What ranks need for a step; constants and inputs by placeholder."""

    pipeline: Pipeline
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]

    @staticmethod
    def of(program: Program, pipeline: Pipeline, batch: Mapping[str, Tensor]) -> WholeStep:
        constants = {name: compute() for name, compute in program.constants.items()}
        inputs = {name: batch[info.path].clone() for name, info in program.inputs.items()}
        return WholeStep(pipeline, constants, inputs)

    def bytes(self) -> tuple[float, float]:
        """`step_bytes` of this rank; all ranks of the pipeline call it."""
        torch.set_num_threads(1)
        pipeline, device = self.pipeline, torch.device("cpu")
        several = pipeline.n_ranks > 1
        rank = dist.get_rank() if several else 0
        meshes, device_of_rank = pipeline.device_meshes, pipeline.device_of(rank)
        groups = [make_groups(mesh) if several else {} for mesh in meshes][device_of_rank]
        joined = (DistMessenger(device), world_group()) if pipeline.n_stages > 1 else (None, None)
        codes = {}
        for k in pipeline.stages_of(rank):
            text = emit(differentiate(pipeline.stages[k]), k, pipeline.n_stages)
            codes[k], _ = load_code(f"stage_{k}.py", text)
        environment = Environment(device, groups, *joined)
        executor = Executor(pipeline, rank, codes, environment, self.constants)
        return step_bytes(executor, self.inputs)


def bytes_of_each(steps: Sequence[WholeStep]) -> list[tuple[float, float]]:
    """The job of a worker: one after the other."""
    return [step.bytes() for step in steps]


def step_bytes(executor: Executor, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """(peak over a step, the optimizer's included; between steps), once moments exist: the less
    of two steps where there are several ranks."""
    inputs = dict(inputs)
    stored = {
        p.name: (torch.randn(p.stored.shape) * 0.02).requires_grad_()
        for stage in executor.stages.values()
        for p in stage.program.parameters
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
            peaks.append(live.peak_bytes)
    return min(peaks), between_bytes
