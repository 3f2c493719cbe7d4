"""Lower bounds on the step time of pipelines, known before any placement problem is built.

The bound assumes that every operator of a stage is shared equally by all devices of the stage, and
that there are no collectives, updates or messages (`least_times_s` of `passes/intra/intra_op.py`).
With m microbatches on n devices, layers k to l take at least

    time(k, l, n) = sum over their operators of  (whole - launches) / (m n)  +  launches

seconds per microbatch (`StageBounds.times_s`). From these times, `least_span_s` of
`passes/solvers/stages/tables.py` bounds the step (`StageBounds.step_s`). The bound thus includes
the bubble, layers that do not divide evenly, and the launches of small microbatches. No simulated
step is below it. It is tighter with what stages take at least by their layers (`layer_bounds.py`)
and by memory (`rerun_bounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.mesh import Mesh
from autopar.passes.analysis import Analysis
from autopar.passes.inter.layers import Layers, sums_of_ranges
from autopar.passes.intra import least_times_s
from autopar.passes.solvers.stages import StageProblem, least_span_s

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageBounds:
    """Least seconds of every range of layers of one program, [first layer, last layer].

    `shared_s` is divided by devices and microbatches. `launches_s` is paid in full on every device
    for every microbatch.
    """

    shared_s: Array
    launches_s: Array

    @staticmethod
    def of(analysis: Analysis, cost: CostModel, layers: Layers) -> StageBounds:
        whole_s, launches_s = least_times_s(analysis, cost)
        parts = np.stack((whole_s - launches_s, launches_s))
        of_layers = np.add.reduceat(parts, [0, *layers.ends[:-1]], axis=1)
        return StageBounds(*map(sums_of_ranges, of_layers))

    def times_s(self, n_ranks: int, n_microbatches: int) -> Array:
        """Least seconds of one microbatch on `n_ranks` devices, [first layer, last layer]."""
        return self.shared_s / (n_microbatches * n_ranks) + self.launches_s

    def balanced_s(self, last_layers: Sequence[int], n_ranks: int, n_microbatches: int) -> float:
        """Lower bound on a step whose stages end with these layers and have `n_ranks` devices."""
        firsts = [0, *(last + 1 for last in last_layers[:-1])]
        times_s = self.times_s(n_ranks, n_microbatches)[firsts, last_layers]
        before_s = np.cumsum(times_s) - times_s
        return float((before_s + n_microbatches * times_s).max())

    def step_s(
        self,
        mesh: Mesh,
        sizes: Sequence[int],
        n_microbatches: int,
        n_stages: int | None,
        own_s: Callable[[int, Array], Array] | None = None,
    ) -> float:
        """Lower bound on a step of all pipelines whose stages have `sizes` devices.

        None for `n_stages` allows any number of stages. `own_s` has what a stage on so many devices
        takes at least in a step, by the number of stages after it: [first layer, last layer,
        numbers]; without it, its microbatches in equal shares. Infinite if there is no such
        pipeline.
        """
        time_s = np.stack([self.times_s(n, n_microbatches) for n in sizes], axis=-1)
        nothing = np.zeros_like(time_s)
        problem = StageProblem(
            time_s, nothing, nothing, nothing, tuple(sizes), mesh.n_ranks, n_microbatches,
            n_stages=n_stages, node_devices=mesh.devices_per_node,
        )  # fmt: skip
        if own_s is None:
            return least_span_s(problem)
        n_after = np.arange(problem.n_levels, dtype=float)
        return least_span_s(problem, np.stack([own_s(n, n_after) for n in sizes], axis=2))
