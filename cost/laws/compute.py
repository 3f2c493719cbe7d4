"""How long one operator takes on one device: a roofline plus launch time, for all operators.

    matmul      max(flops / rate + u bytes / bytes_per_s, bytes / bytes_per_s) + launch_s
    attention   the same, with the forward and backward rates of a fused kernel
    memory      bytes / bytes_per_s + launch_s                                    (`op_time_s`)

u is the exposed memory time of a matmul on top of its arithmetic, divided by the time to touch each
operand once (`product_traffic_ratio`): tiles read operands several times and hide most of it. 2mkn
flops touch mk + kn + mn elements, so the efficiency of a matmul depends on its sizes
(`product_efficiency`). A small m, n or k lowers it, and so does the launch.

Replicated work costs its full time on every rank. Views launch nothing and are free; callers do
not price them.
"""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.hardware import ProfiledDevice, attention_flops_per_s, flops_per_s
from autopar.mesh import Device

Kind = Literal["matmul", "attention", "memory"]
Array = NDArray[np.float64]


@overload
def op_time_s(
    flops: float, bytes_moved: float, device: Device, dtype: torch.dtype | None = None,
    kind: Kind = "matmul", *, is_backward: bool = False,
) -> float: ...  # fmt: skip
@overload
def op_time_s(
    flops: Array, bytes_moved: Array, device: Device, dtype: torch.dtype | None = None,
    kind: Kind = "matmul", *, is_backward: bool = False,
) -> Array: ...  # fmt: skip
def op_time_s(
    flops: float | Array,
    bytes_moved: float | Array,
    device: Device,
    dtype: torch.dtype | None = None,
    kind: Kind = "matmul",
    *,
    is_backward: bool = False,
) -> float | Array:
    """Seconds of one operator that computes `flops` and reads and writes `bytes_moved`.

    Arrays give one time per choice. `dtype` is the operator's; None means the dtype that the device
    was resolved for. Without flops, every `kind` costs memory time only.

    Raises:
        NotSupportedError: there are flops, and the profile has no rate for `dtype`.
    """
    memory_s = bytes_moved / device.bytes_per_s
    if kind == "memory" or not np.any(flops):
        return memory_s + device.launch_s
    if kind == "attention":
        rate = attention_flops_per_s(device, dtype)[is_backward]
    else:
        rate = flops_per_s(device, dtype)
    exposed = device.product_traffic_ratio if isinstance(device, ProfiledDevice) else 0.0
    busy_s = np.maximum(flops / rate + exposed * memory_s, memory_s) + device.launch_s
    return busy_s if isinstance(busy_s, np.ndarray) else float(busy_s)


def product_efficiency(m: int, n: int, k: int, device: Device, dtype: torch.dtype) -> float:
    """Achieved rate of an m x k by k x n matmul / the rate of an infinitely large one."""
    flops, n_elements = 2.0 * m * n * k, m * k + k * n + m * n
    time_s = op_time_s(flops, float(n_elements * dtype.itemsize), device, dtype)
    return flops / flops_per_s(device, dtype) / time_s
