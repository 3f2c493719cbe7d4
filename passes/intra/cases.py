"""The cases for which problems are built at once: a logical mesh and a number of microbatches each.

All cases have the same variables and choices, because their meshes use the same axes. Only sizes
differ, and what divides them. So every array of numbers starts with an axis of cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.arrays import Array, Indices
from autopar.caching import once
from autopar.cost.laws import CostModel
from autopar.passes.reshard import canonical_cost
from autopar.placement import TensorType

# A cost model and a number of microbatches.
Case = tuple[CostModel, int]


@dataclass(frozen=True, eq=False)
class Cases:
    """Cases whose meshes use the same axes of the same devices.

    `types` maps number of microbatches -> value -> its type in one microbatch. `n_splits` maps
    number of microbatches -> the parts into which the rows of the graph are split.
    """

    every: tuple[Case, ...]
    types: Mapping[int, Mapping[str, TensorType]]
    n_splits: Mapping[int, int]

    def __post_init__(self) -> None:
        first = self.costs[0]
        for cost in self.meshes:
            assert cost.mesh.active_axes == first.mesh.active_axes, "meshes that use other axes"
            assert (cost.mesh.device, cost.dtype) == (first.mesh.device, first.dtype)

    def __len__(self) -> int:
        return len(self.every)

    @cached_property
    def costs(self) -> tuple[CostModel, ...]:
        return tuple(cost for cost, _ in self.every)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """[cases]: the number of microbatches."""
        return tuple(m for _, m in self.every)

    @cached_property
    def distinct_counts(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.counts))

    @cached_property
    def count_of(self) -> Indices:
        """[cases]: the index in `distinct_counts`."""
        return np.array([self.distinct_counts.index(m) for m in self.counts], dtype=np.int64)

    @cached_property
    def n_microbatches(self) -> Array:
        return np.array(self.counts, dtype=np.float64)

    @cached_property
    def meshes(self) -> tuple[CostModel, ...]:
        """The distinct cost models of all cases."""
        return tuple(dict.fromkeys(self.costs))

    @cached_property
    def move_costs(self) -> tuple[CostModel, ...]:
        """Per mesh, the cost model that prices its moves (`canonical_cost`)."""
        return tuple(map(canonical_cost, self.meshes))

    @cached_property
    def mesh_of(self) -> Indices:
        """[cases]: the index in `meshes`."""
        place = {cost: i for i, cost in enumerate(self.meshes)}
        return np.array([place[cost] for cost in self.costs], dtype=np.int64)

    @cached_property
    def sizes(self) -> Indices:
        """[cases, axes]: ranks of every axis."""
        return np.array([cost.mesh.sizes for cost in self.costs], dtype=np.int64)

    @cached_property
    def active_axes(self) -> tuple[int, ...]:
        return self.costs[0].mesh.active_axes

    def type(self, value: str) -> TensorType:
        """A value's type in the first case; for facts that are the same in every case."""
        return self.types[self.counts[0]][value]

    @once
    def distinct_types(self, value: str) -> tuple[TensorType, ...]:
        """A value's types, one per number in `distinct_counts`."""
        return tuple(self.types[m][value] for m in self.distinct_counts)

    @once
    def size_bytes(self, value: str) -> Array:
        """[cases]: the bytes of a value in one microbatch, unsharded."""
        of_counts = [t.size_bytes for t in self.distinct_types(value)]
        return np.array(of_counts, dtype=np.float64)[self.count_of]

    @once
    def factor(self, value: str, dim: int, factor: int) -> Indices:
        """[cases]: the size of one factor of a value's dim."""
        of_counts = [t.dims[dim][factor] for t in self.distinct_types(value)]
        return np.array(of_counts, dtype=np.int64)[self.count_of]


def array_of(cases: Cases, of_counts: Sequence[float]) -> Array:
    """[cases, 1], from values per number in `distinct_counts`."""
    return np.array(of_counts, dtype=np.float64)[cases.count_of][:, None]
