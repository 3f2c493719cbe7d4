"""What a stage program costs: its collectives, its step time, its memory.

    compute   = n_microbatches sum over lines (forward + backward) + local parts of reshards
    comm      = sum over collectives of count x time(kind, size_bytes, group)
    step      = compute + comm + optimizer                  (one stage, nothing overlaps yet)
    mfu       = model flops of all ranks / (n_ranks x peak flops_per_s x step)

Collectives come from `autopar.collective`, which says what the runtime executes, so a bucket
is priced as the one call that it is. Memory is `liveness.peak_memory`.
"""

from __future__ import annotations

import math

import torch

from autopar.collective import (
    Collective,
    StepCalls,
    differentiated,
    regathered,
    step_calls,
    summarise,
)
from autopar.cost.liveness import peak_memory
from autopar.cost.memory import optimizer_time_s
from autopar.cost.model import CostModel
from autopar.errors import NotSupportedError
from autopar.moves import COLLECTIVES
from autopar.predicted import Predicted
from autopar.stage_program import CallLine, GatherLine, MoveLine, StageProgram

# Optimizers that update every element alone, so a rank updates its shard without talking.
_ELEMENTWISE = ("adamw", "adam", "sgd")


def collectives_of(
    program: StageProgram, optimizer: str = "adamw", stage: int = 0, local_inputs: bool = False
) -> tuple[Collective, ...]:
    """Every collective of one training step, in order, alike ones counted.

    `local_inputs`: every rank is given its own rows of the batch, so divisors are summed.

    Raises `NotSupportedError` for an optimizer that would need collectives of its own.
    """
    if optimizer not in _ELEMENTWISE:
        raise NotSupportedError(
            f"optimizer {optimizer!r} does not update every element alone",
            hint=f"use one of {', '.join(_ELEMENTWISE)}",
        )
    return summarise(step_calls(program, local_inputs), program.axis_names, stage)


def predict(
    program: StageProgram,
    cost: CostModel,
    optimizer: str = "adamw",
    *,
    peak_flops_per_s: float | None = None,
    n_samples: int | None = None,
    n_tokens: int | None = None,
) -> Predicted:
    """Price one training step of a one-stage program.

    peak_flops_per_s: the datasheet's, for MFU; by default what the device achieves.
    n_samples, n_tokens: of one global batch.
    """
    n_micro = program.n_microbatches
    inner_s = n_micro * _inner_s(program, cost)
    compute_s = n_micro * _lines_s(program) - inner_s + _local_conversions_s(program)
    comm_s = comm_time_s(step_calls(program), cost)
    update_s = _update_s(program, cost, optimizer)
    step_s = compute_s + comm_s + update_s
    flops = n_micro * sum(c.model_flops for c in program.body if isinstance(c, CallLine))
    peak = peak_flops_per_s or cost.mesh.device.flops_per_s
    return Predicted(
        step_time_s=step_s,
        peak_bytes=float(peak_memory(program, optimizer).peak_bytes),
        compute_time_s=compute_s,
        comm_time_s=comm_s,
        exposed_comm_s=comm_s,
        optimizer_time_s=update_s,
        bubble=0.0,
        samples_per_s=n_samples / step_s if n_samples and step_s else None,
        tokens_per_s=n_tokens / step_s if n_tokens and step_s else None,
        mfu=flops / (cost.mesh.n_ranks * peak * step_s) if step_s else 0.0,
    )


def comm_time_s(calls: StepCalls, cost: CostModel) -> float:
    """Seconds of all collectives of a step, one after the other."""
    return math.fsum(
        count * cost.primitive_time_s(call.kind, call.size_bytes, call.axes)
        for call, count in calls.counted()
    )


def _inner_s(program: StageProgram, cost: CostModel) -> float:
    """Collectives inside lowered operators, which their lines include."""
    return math.fsum(
        cost.primitive_time_s("all_reduce", size_bytes, line.lowered_axes)
        for line in program.body
        if isinstance(line, CallLine)
        for size_bytes in line.inner_bytes
    )


def _lines_s(program: StageProgram) -> float:
    """Operators and the local parts of reshards of one microbatch."""
    reached, again = differentiated(program), regathered(program.body)
    times = []
    for i, line in enumerate(program.body):
        if isinstance(line, CallLine):
            times += [line.forward_s, line.backward_s if i in reached else 0.0]
        elif isinstance(line, MoveLine):
            times.append(_local_s(line, i in reached))
        elif isinstance(line, GatherLine):
            times += [_local_s(move, i in reached) for move in line.moves]
        if i in reached:
            times += [_local_s(m, False) for gather in again.get(i, ()) for m in gather.moves]
    return math.fsum(times)


def _local_s(line: MoveLine, with_backward: bool) -> float:
    """The primitives of a move that communicate nothing."""
    forward_s = 0.0 if line.move.forward in COLLECTIVES else line.forward_s
    backward_s = 0.0 if line.move.backward in COLLECTIVES else line.backward_s
    return forward_s + (backward_s if with_backward else 0.0)


def _local_conversions_s(program: StageProgram) -> float:
    """Local parts of turning parameters into use once, and gradients back."""
    times = []
    for parameter in program.parameters:
        n_returns = program.n_microbatches if parameter.period == "micro" else 1
        for use in parameter.uses:
            for move in use.moves:
                forward_s = _local_s(move, False)
                times += [forward_s, n_returns * (_local_s(move, True) - forward_s)]
    return math.fsum(times)


def _update_s(program: StageProgram, cost: CostModel, optimizer: str) -> float:
    """The optimizer's update of the stored shards, all tensors of a dtype in one launch each."""
    stored: dict[torch.dtype, int] = {}
    for parameter in program.parameters:
        if parameter.requires_grad:
            dtype = parameter.stored.dtype
            stored[dtype] = stored.get(dtype, 0) + math.prod(parameter.stored.shape)
    device = cost.mesh.device
    return math.fsum(
        optimizer_time_s(n_elements, optimizer, dtype, device)
        for dtype, n_elements in stored.items()
    )
