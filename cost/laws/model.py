"""The cost model of one stage: seconds of collectives and operators on a logical mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.hardware import group_on
from autopar.cost.laws.collectives import collective_lines, collective_time_s
from autopar.cost.laws.compute import Kind, op_time_s
from autopar.mesh import LogicalMesh
from autopar.placement import COLLECTIVES, PrimitiveKind
from autopar.program import BUCKET_BYTES


@dataclass(frozen=True)
class CostModel:
    """Prices what a stage does; `mesh` carries its links and device."""

    mesh: LogicalMesh
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = BUCKET_BYTES

    def primitive_time_s(
        self, kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]
    ) -> float:
        """Seconds of one primitive of a move. Local ones (cut, pad) touch memory once."""
        return _primitive_time_s(self, kind, size_bytes, axes)

    def lines(self, kind: PrimitiveKind, axes: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """(seconds a, seconds per byte b) of each algorithm for a primitive.

        `primitive_time_s` of n bytes is the minimum of a + b n.
        """
        if kind == "identity":
            return ((0.0, 0.0),)
        if kind in COLLECTIVES:
            return collective_lines(kind, group_on(self.mesh, axes))
        return ((self.mesh.device.launch_s, 1.0 / self.mesh.device.bytes_per_s),)

    def bucketed_time_s(self, kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]) -> float:
        """Seconds of a primitive on one tensor of a bucket: its share, by bytes, of a full bucket.

        A tensor of a full bucket or more has a collective of its own.
        """
        if kind not in COLLECTIVES or size_bytes >= self.bucket_bytes:
            return self.primitive_time_s(kind, size_bytes, axes)
        bucket_s = self.primitive_time_s(kind, self.bucket_bytes, axes)
        return bucket_s * size_bytes / self.bucket_bytes

    def for_parameters(self, size_bytes: int) -> CostModel:
        """This model for parameters of `size_bytes` in total, which may not fill a bucket."""
        return replace(self, bucket_bytes=max(min(BUCKET_BYTES, size_bytes), 1))

    def op_times_s(
        self,
        flops: NDArray[np.float64],
        size_bytes: NDArray[np.float64],
        kind: Kind = "matmul",
        *,
        is_backward: bool = False,
    ) -> NDArray[np.float64]:
        """`op_time_s` of each choice in the arrays."""
        device, dtype = self.mesh.device, self.dtype
        return op_time_s(flops, size_bytes, device, dtype, kind, is_backward=is_backward)


@lru_cache(maxsize=1 << 16)
def _primitive_time_s(
    model: CostModel, kind: PrimitiveKind, size_bytes: int, axes: tuple[int, ...]
) -> float:
    if kind == "identity":
        return 0.0
    if kind in COLLECTIVES:
        return collective_time_s(kind, size_bytes, group_on(model.mesh, axes))
    return size_bytes / model.mesh.device.bytes_per_s + model.mesh.device.launch_s
