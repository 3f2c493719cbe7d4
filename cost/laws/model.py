"""The cost model of one stage: seconds of collectives and operators on a logical mesh.

An operator on one device follows a roofline, plus its launch:

    matmul      max(flops / rate + u bytes / bytes_per_s, bytes / bytes_per_s) + launch_s
    attention   the same, with the forward and backward rates of a fused kernel
    memory      bytes / bytes_per_s + launch_s                                    (`op_time_s`)

u is the exposed memory time of a matmul on top of its arithmetic, divided by the time to touch each
operand once (`product_traffic_ratio`): tiles read operands several times and hide most of it. 2mkn
flops touch mk + kn + mn elements, so the efficiency of a matmul depends on its sizes. A small m, n
or k lowers it, and so does the launch.

Replicated work costs its full time on every rank. Views launch nothing and are free; callers do
not price them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, overload

import numpy as np
import torch

from autopar.arrays import Array
from autopar.cost.hardware import (
    Hardware,
    KernelMode,
    ProfiledDevice,
    Software,
    attention_flops_per_s,
    flops_per_s,
    group_on,
    load_software,
    share_under_matmul,
    software_of,
)
from autopar.cost.laws.collectives import collective_lines, collective_time_s
from autopar.lengths import Lengths, mean_shown
from autopar.mesh import Device, LogicalMesh
from autopar.placement import COMMUNICATION, PrimitiveKind
from autopar.program.communication import BUCKET_BYTES

Kind = Literal["matmul", "attention", "memory"]


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


@dataclass(frozen=True)
class CostModel:
    """Prices what a stage does; `mesh` carries its links and device.

    Unless it `hides`, it is an abstract machine where compute hides no communication. `kernels`:
    how operators run (`autopar/passes/analysis/kernels.py`). `imbalance`: the fullest of sharded
    experts has so many times the mean of rows. `lengths`: of packed documents.
    `hides_tp`: collectives at a matmul run under it (`overlapped_tp` of `software`, a name).
    """

    mesh: LogicalMesh
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = BUCKET_BYTES
    hides: bool = True
    kernels: KernelMode = "eager"
    imbalance: float = 1.0
    lengths: Lengths = ()
    hides_tp: bool = False
    software: str = "autopar"

    @staticmethod
    def of(mesh: LogicalMesh, hardware: Hardware) -> CostModel:
        """Prices on a view of a machine."""
        runs = software_of(hardware.software, is_gpu=hardware.is_gpu)
        return CostModel(
            mesh, hardware.dtype, kernels=hardware.kernels, imbalance=hardware.imbalance,
            lengths=hardware.lengths, hides_tp=runs.overlapped_tp, software=runs.name,
        )  # fmt: skip

    @property
    def runs(self) -> Software:
        """The software that runs the stage."""
        return load_software(self.software)

    def shown(self, n_tokens: int) -> float:
        """What packed documents show of the pairs of a row of so many tokens, on average."""
        return mean_shown(self.lengths, n_tokens) if self.lengths else 1.0

    def primitive_time_s(
        self, kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]
    ) -> float:
        """Seconds of one primitive of a move. Local ones (cut, pad) touch memory once."""
        return _primitive_time_s(self, kind, size_bytes, axes)

    def share_under_matmul(self, kind: PrimitiveKind, axes: tuple[int, ...]) -> float:
        """The share of a collective at a matmul that runs beside it."""
        return share_under_matmul(kind, self.mesh.group_size(axes)) if self.hides_tp else 0.0

    def cast_time_s(self, size_bytes: int) -> float:
        """Seconds of reading and writing so many bytes; one launch casts many parameters."""
        return size_bytes / self.mesh.device.bytes_per_s

    def lines(self, kind: PrimitiveKind, axes: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """(seconds a, seconds per byte b) of each algorithm for a primitive.

        `primitive_time_s` of n bytes is the minimum of a + b n.
        """
        if kind == "identity":
            return ((0.0, 0.0),)
        if kind in COMMUNICATION:
            return collective_lines(kind, group_on(self.mesh, axes))
        return ((self.mesh.device.launch_s, 1.0 / self.mesh.device.bytes_per_s),)

    def limit_buckets(self, size_bytes: int) -> CostModel:
        """This model for parameters of `size_bytes` in total, which may not fill a bucket."""
        return replace(self, bucket_bytes=max(min(BUCKET_BYTES, size_bytes), 1))

    def op_times_s(
        self,
        flops: Array,
        size_bytes: Array,
        kind: Kind = "matmul",
        *,
        is_backward: bool = False,
        n_launches: int = 1,
    ) -> Array:
        """`op_time_s` of each choice in the arrays. An operator of a kernel that another one began
        launches nothing."""
        device, dtype = self.mesh.device, self.dtype
        time_s = op_time_s(flops, size_bytes, device, dtype, kind, is_backward=is_backward)
        return time_s if n_launches else time_s - device.launch_s


@lru_cache(maxsize=1 << 16)
def _primitive_time_s(
    model: CostModel, kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]
) -> float:
    if kind == "identity":
        return 0.0
    if kind in COMMUNICATION:
        return collective_time_s(kind, size_bytes, group_on(model.mesh, axes))
    return size_bytes / model.mesh.device.bytes_per_s + model.mesh.device.launch_s
