"""How long one operator takes on one device: a roofline with a floor.

    time = max(flops / achievable flops_per_s, bytes / bytes_per_s) + launch_s

`flops` counts contractions, attention and convolutions (one multiply-add is 2); every other
operator costs only its bytes. Replicated work is charged in full on every rank. Views launch
nothing and are free; callers do not ask for them.
"""

from __future__ import annotations

import torch

from autopar.cost.hardware import flops_per_s
from autopar.mesh import Device


def op_time_s(
    flops: float, bytes_moved: float, device: Device, dtype: torch.dtype | None = None
) -> float:
    """Seconds of one operator that computes `flops` and reads and writes `bytes_moved`.

    `dtype` is the operator's; None means the one the device was resolved for.

    Raises:
        NotSupportedError: there are flops, and the profile has no rate for `dtype`.
    """
    assert flops >= 0 and bytes_moved >= 0, (flops, bytes_moved)
    compute_s = flops / flops_per_s(device, dtype) if flops else 0.0
    return max(compute_s, bytes_moved / device.bytes_per_s) + device.launch_s
