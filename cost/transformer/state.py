"""What a parameter keeps and what its update moves, by the software of a run.

Bytes kept per parameter are rows of `cost/memory/state.py`, which names their papers:

parameters in float32       `model`                        4 + 4 + 8
gradients in float32        `bf16-mixed-fp32-gradients`    2 + 4 + 12
neither                     `fp16-mixed`                   2 + 2 + 12

Bytes that the end of a step moves per parameter (`update_time_s`):

fused      gradient, master and two moments read, the last three written, the parameter written:
           4 x 4 + 3 x 4 + 2 = 30
not fused  the tensors of `torch.optim.AdamW`, one operator at a time: `OPTIMIZERS`
norm       clipping reads the gradients once for their norm and once more to scale them: 4 + 8
cleared    gradients are set to zero: 4
"""

from __future__ import annotations

import torch

from autopar.cost.hardware import Software
from autopar.cost.memory import StaticBytes, optimizer_time_s, static_bytes_per_param
from autopar.mesh import Device

_OPTIMIZER = "adamw"
_FUSED_BYTES, _NORM_BYTES, _CLEARED_BYTES = 30, 12, 4


def static_bytes(software: Software) -> StaticBytes:
    """Bytes of one parameter and its state, before ZeRO divides them."""
    dtype, policy = _precision(software)
    return static_bytes_per_param(_OPTIMIZER, dtype, policy)


def update_time_s(n_parameters: float, software: Software, device: Device) -> float:
    """Seconds of clipping and zeroing gradients and of one AdamW update of `n_parameters`."""
    around_s = n_parameters * (_NORM_BYTES + _CLEARED_BYTES) / device.bytes_per_s
    if software.fused_optimizer:
        return around_s + n_parameters * _FUSED_BYTES / device.bytes_per_s
    dtype, policy = _precision(software)
    return around_s + optimizer_time_s(n_parameters, _OPTIMIZER, dtype, device, policy)


def _precision(software: Software) -> tuple[torch.dtype, str]:
    """The dtype of parameters, and the policy for the state beside them."""
    if software.fp32_parameters:
        return torch.float32, "model"
    policy = "bf16-mixed-fp32-gradients" if software.fp32_gradients else "fp16-mixed"
    return torch.bfloat16, policy
