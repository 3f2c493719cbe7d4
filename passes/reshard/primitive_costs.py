"""Seconds of a graph's primitives, for tensors of any size and several meshes at once.

Each algorithm of a collective takes a + b n seconds for n bytes, and so does a local copy. A
primitive takes the minimum over its algorithms (`CostModel.lines`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.cost.laws import CostModel
from autopar.cost.price import slowdown_of
from autopar.passes.reshard.move_graph import MoveGraph
from autopar.placement import PrimitiveKind


@dataclass(frozen=True, eq=False)
class PrimitiveLines:
    """The lines a + b n of primitives on several meshes.

    `latency_s` and `s_per_byte` are [meshes, primitives, algorithms]. `n_shards` [meshes,
    primitives] is the number of shards of the tensor that a primitive sends. `waited` [meshes,
    primitives]: what an activation's takes at least of a step, as a share of its seconds.
    """

    latency_s: Array
    s_per_byte: Array
    n_shards: Indices
    is_collective: BoolArray
    bucket_bytes: Array
    waited: Array

    def of(self, meshes: Indices) -> PrimitiveLines:
        """The lines of some meshes, which may repeat."""
        return PrimitiveLines(
            self.latency_s[meshes], self.s_per_byte[meshes], self.n_shards[meshes],
            self.is_collective, self.bucket_bytes[meshes], self.waited[meshes],
        )  # fmt: skip

    def seconds(self, size_bytes: Array) -> Array:
        """[meshes, primitives]: seconds of a step for activations of `size_bytes` [meshes],
        unsharded. Where software hides collectives under matmuls, it is taken to hide all."""
        return self.waited * self._local_times_s(size_bytes[:, None] / self.n_shards)

    def bucket_times_s(self, size_bytes: Array, most_bytes: float = math.inf) -> Array:
        """The same for tensors that share each collective with a full bucket, of `most_bytes` at
        most."""
        sent = size_bytes[:, None] / self.n_shards
        bucket = np.minimum(self.bucket_bytes, most_bytes)[:, None]
        shares = self.is_collective & (sent < bucket)
        full_s = self._local_times_s(np.where(shares, bucket, sent))
        return np.where(shares, full_s * sent / bucket, full_s)

    def _local_times_s(self, size_bytes: Array) -> Array:
        times: Array = (self.latency_s + self.s_per_byte * size_bytes[..., None]).min(axis=-1)
        return times


def primitive_lines(graph: MoveGraph, costs: tuple[CostModel, ...]) -> PrimitiveLines:
    """The lines of a graph's primitives on the meshes of some cost models."""
    return _primitive_lines(graph.drawn or graph, costs)


@lru_cache(maxsize=512)
def _primitive_lines(graph: MoveGraph, costs: tuple[CostModel, ...]) -> PrimitiveLines:
    # Primitives that differ only in how their tensors are sharded have the same lines.
    calls = dict.fromkeys((p.kind, p.axes) for p in graph.primitives)
    number = {call: k for k, call in enumerate(calls)}
    lines = [[_lines(cost, *call) for call in number] for cost in costs]
    n_most = max((len(of) for row in lines for of in row), default=1)
    shape = (len(costs), len(number), n_most)
    latency_s, s_per_byte = np.full(shape, np.inf), np.zeros(shape)
    for b, row in enumerate(lines):
        for k, of in enumerate(row):
            latency_s[b, k, : len(of)] = [a for a, _ in of]
            s_per_byte[b, k, : len(of)] = [slope for _, slope in of]
    which = np.array([number[p.kind, p.axes] for p in graph.primitives], dtype=np.int64)
    sizes = np.array([cost.mesh.sizes for cost in costs], dtype=np.int64)
    is_cut = np.zeros((len(graph.primitives), sizes.shape[1]), dtype=bool)
    for p, primitive in enumerate(graph.primitives):
        is_cut[p, list(primitive.shards)] = True
    n_shards = np.where(is_cut, sizes[:, None], 1).prod(axis=2)
    is_collective = graph.calls > 0
    buckets = np.array([float(cost.bucket_bytes) for cost in costs])
    latency_s, s_per_byte = (np.take(array, which, axis=1) for array in (latency_s, s_per_byte))
    waited = np.array([[_waited(cost, *call) for call in number] for cost in costs])[:, which]
    return PrimitiveLines(latency_s, s_per_byte, n_shards, is_collective, buckets, waited)


def _waited(cost: CostModel, kind: PrimitiveKind, axes: tuple[int, ...]) -> float:
    """1 less what a matmul hides; a second that is hidden still slows compute."""
    return 1.0 - cost.share_under_matmul(kind, axes) / (1.0 + slowdown_of(cost))


@lru_cache(maxsize=1 << 14)
def _lines(
    cost: CostModel, kind: PrimitiveKind, axes: tuple[int, ...]
) -> tuple[tuple[float, float], ...]:
    return cost.lines(kind, axes)
