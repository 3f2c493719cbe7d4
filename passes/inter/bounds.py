"""What a pipeline takes at least, known before any of its stages' problems is built.

Every operator of a stage is in equal shares on all its devices, without a collective, an update or
a message (`intra_op.least_times_s`). With m microbatches on n devices layers k to l take

    time(k, l, n) = sum over their operators of  (whole - launches) / (m n)  +  launches

per microbatch, and a step what `least_span_s` of `solvers/stage_tables.py` says of these times. So
a bubble, layers that do not divide evenly, and launches of small microbatches are in the bound, and
no simulated step is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.mesh import Mesh
from autopar.passes.analysis import Analysis
from autopar.passes.inter.layers import Layers
from autopar.passes.intra import least_times_s
from autopar.passes.solvers.stages import StageProblem, least_span_s

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Of one program: `shared_s` and `launches_s` are [first layer, last layer], the seconds that
    devices and microbatches divide, and those that every one of them takes."""

    shared_s: Array
    launches_s: Array

    @staticmethod
    def of(analysis: Analysis, cost: CostModel, layers: Layers) -> StageBounds:
        whole_s, launches_s = least_times_s(analysis, cost)
        parts = np.stack((whole_s - launches_s, launches_s))
        of_layers = np.add.reduceat(parts, [0, *layers.ends[:-1]], axis=1)
        n = layers.n_layers
        sums = np.stack([np.cumsum(np.triu(np.tile(p, (n, 1))), axis=1) for p in of_layers])
        return StageBounds(sums[0], sums[1])

    def times_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """Of one microbatch on so many devices, [first layer, last layer]."""
        return self.shared_s / (n_microbatches * n_ranks) + self.launches_s

    def balanced_s(self, last_layers: Sequence[int], n_ranks: int, n_microbatches: int) -> float:
        """A step of stages that end with these layers, of `n_ranks` devices each."""
        firsts = [0, *(last + 1 for last in last_layers[:-1])]
        times_s = self.times_s(n_ranks, n_microbatches)[firsts, last_layers]
        before_s = np.cumsum(times_s) - times_s
        return float((before_s + n_microbatches * times_s).max())

    def step_s(
        self, mesh: Mesh, sizes: Sequence[int], n_microbatches: int, n_stages: int | None
    ) -> float:
        """The fastest step on stages of `sizes` devices, of any number of them or of `n_stages`;
        infinite where there is none."""
        time_s = np.stack([self.times_s(n, n_microbatches) for n in sizes], axis=-1)
        nothing = np.zeros_like(time_s)
        problem = StageProblem(
            time_s, nothing, nothing, nothing, tuple(sizes), mesh.n_ranks, n_microbatches,
            n_stages=n_stages, node_devices=mesh.devices_per_node,
        )  # fmt: skip
        return least_span_s(problem)
