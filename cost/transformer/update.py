"""The optimizer's update of what a rank stores: bytes moved per parameter.

fused      gradient, master and two moments read, the last three written, the parameter written:
           4 x 4 + 3 x 4 + 2 = 30
else       the tensors of `torch.optim.adamw` one operator at a time: `OPTIMIZERS`
norm       clipping reads the gradients once for their norm and once more to scale them: 4 + 8
cleared    gradients are set to zero: 4
"""

from __future__ import annotations

import torch

from autopar.cost.memory import optimizer_time_s
from autopar.cost.transformer.recipe import Software
from autopar.mesh import Device

_FUSED_BYTES, _NORM_BYTES, _CLEARED_BYTES = 30, 12, 4


def update_time_s(n_parameters: float, software: Software, device: Device) -> float:
    """Seconds of clipping and one AdamW update of `n_parameters`."""
    around_s = n_parameters * (_NORM_BYTES + _CLEARED_BYTES) / device.bytes_per_s
    if software.fused_optimizer:
        return around_s + n_parameters * _FUSED_BYTES / device.bytes_per_s
    return around_s + optimizer_time_s(
        n_parameters, "adamw", torch.bfloat16, device, "bf16-mixed-fp32-gradients"
    )
