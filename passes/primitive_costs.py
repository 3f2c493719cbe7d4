"""Seconds of a graph's primitives on tensors of any size, on several meshes at once.

Every algorithm of a collective takes a + b n seconds for n bytes, and so does a local copy; a
primitive takes the least over its algorithms (`CostModel.lines`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.moves import COLLECTIVES
from autopar.passes.move_graph import MoveGraph

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PrimitiveLines:
    """`latency_s`, `s_per_byte` are [meshes, primitives, algorithms]; `n_shards` is [meshes,
    primitives], of the local tensor that a primitive sends."""

    latency_s: Array
    s_per_byte: Array
    n_shards: NDArray[np.int64]
    is_collective: NDArray[np.bool_]
    bucket_bytes: Array

    def of(self, meshes: NDArray[np.int64]) -> PrimitiveLines:
        """Those of some of the meshes, which may repeat."""
        return PrimitiveLines(
            self.latency_s[meshes], self.s_per_byte[meshes], self.n_shards[meshes],
            self.is_collective, self.bucket_bytes[meshes],
        )  # fmt: skip

    def seconds(self, size_bytes: Array) -> Array:
        """[meshes, primitives], on tensors of `size_bytes` [meshes] in all."""
        return self._of_local(size_bytes[:, None] / self.n_shards)

    def bucketed(self, size_bytes: Array) -> Array:
        """The same, of tensors that share their collectives with a whole bucket."""
        sent, bucket = size_bytes[:, None] / self.n_shards, self.bucket_bytes[:, None]
        shares = self.is_collective & (sent < bucket)
        full_s = self._of_local(np.where(shares, bucket, sent))
        return np.where(shares, full_s * sent / bucket, full_s)

    def _of_local(self, size_bytes: Array) -> Array:
        times: Array = (self.latency_s + self.s_per_byte * size_bytes[..., None]).min(axis=-1)
        return times


@lru_cache(maxsize=512)
def primitive_lines(graph: MoveGraph, costs: tuple[CostModel, ...]) -> PrimitiveLines:
    """The lines of a graph's primitives on the meshes of some cost models."""
    lines = [[cost.lines(p.kind, p.axes) for p in graph.primitives] for cost in costs]
    n_most = max((len(of) for row in lines for of in row), default=1)
    shape = (len(costs), len(graph.primitives), n_most)
    latency_s, s_per_byte = np.full(shape, np.inf), np.zeros(shape)
    n_shards = np.ones(shape[:2], dtype=np.int64)
    for b, (cost, row) in enumerate(zip(costs, lines, strict=True)):
        for p, (primitive, of) in enumerate(zip(graph.primitives, row, strict=True)):
            latency_s[b, p, : len(of)] = [a for a, _ in of]
            s_per_byte[b, p, : len(of)] = [slope for _, slope in of]
            for axis in primitive.shards:
                n_shards[b, p] *= cost.mesh.sizes[axis]
    is_collective = np.array([p.kind in COLLECTIVES for p in graph.primitives], dtype=bool)
    buckets = np.array([float(cost.bucket_bytes) for cost in costs])
    return PrimitiveLines(latency_s, s_per_byte, n_shards, is_collective, buckets)
