"""What a memory budget costs a pipeline at least: operators that run again.

A stage of layers k to l, on n devices and with d microbatches in flight, holds at least

    static(k, l) / n + d kept(k, l) / n                  bytes on each device

where every device has an equal share. What exceeds the budget is freed by running blocks of the
stage again, the cheapest bytes first (`LeastRerun.shares`); d microbatches are freed at once, and n
devices share the work. Without a choice of recompute such a stage is impossible.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import static_bytes_per_param
from autopar.passes.analysis import Analysis, stored_dtype
from autopar.passes.inter.layers import Layers, sums_of_ranges
from autopar.passes.intra import LeastRerun, static_bytes_of

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RerunBounds:
    """Least seconds of a step in which stages run again, within `budget_bytes` on each device.

    `rerun` is None if nothing may run again.
    """

    analysis: Analysis
    layers: Layers
    optimizer: str
    budget_bytes: float
    rerun: LeastRerun | None
    _freed: dict[int, list[tuple[float, Array]]] = field(default_factory=dict, init=False)

    def seconds(self, n_ranks: int, n_microbatches: int, depths: Array) -> Array:
        """[first layer, last layer, depths], for stages on `n_ranks` devices with `depths`
        microbatches in flight. Infinite: impossible."""
        kept = sums_of_ranges(self._kept_bytes(n_microbatches))[:, :, None]
        static = sums_of_ranges(self._static_bytes)[:, :, None]
        missing = (static + depths * kept - n_ranks * self.budget_bytes) / depths
        if self.rerun is None:
            return np.where(missing > 0, np.inf, 0.0)
        every = self._freed_bytes(n_microbatches)
        freed_of = [(price, sums_of_ranges(freed)[:, :, None]) for price, freed in every]
        # What no block frees alone may vanish at no cost, if several blocks run again.
        missing = np.maximum(missing - (kept - sum(freed for _, freed in freed_of)), 0.0)
        out = np.where(static > n_ranks * self.budget_bytes, np.inf, np.zeros_like(missing))
        for price, freed in freed_of:
            taken = np.minimum(missing, freed)
            out += taken * price / n_ranks
            missing -= taken
        seconds: Array = out
        return seconds

    def _freed_bytes(self, m: int) -> list[tuple[float, Array]]:
        """(device-seconds of a step per byte, bytes of one microbatch at that price in each layer),
        the cheapest first."""
        if m not in self._freed:
            found: dict[float, Array] = {}
            ends = self.layers.ends
            assert self.rerun is not None, "only then is it asked"
            for first, freed_bytes, device_s in self.rerun.shares(m):
                price = float(f"{device_s / freed_bytes:.9g}")  # equal blocks have one price
                of = found.setdefault(price, np.zeros(len(ends)))
                of[bisect_right(ends, first)] += freed_bytes
            self._freed[m] = sorted(found.items())
        return self._freed[m]

    def _kept_bytes(self, m: int) -> Array:
        """[layers]: of one microbatch, each value in the first layer that saves it."""
        kept = self.analysis.kept_by_operator(m)
        return np.add.reduceat(kept, [first for first, _ in self.layers.ranges])

    @cached_property
    def _static_bytes(self) -> Array:
        """[layers]: of every parameter, in the first layer that reads it."""
        types, seen = self.analysis.types.tensors, set[str]()
        each = static_bytes_per_param(self.optimizer, stored_dtype(self.analysis)).total_bytes
        out = np.zeros(self.layers.n_layers)
        for layer, (first, end) in enumerate(self.layers.ranges):
            read = {n for o in self.analysis.operators[first:end] for n in o.inputs}
            new = read & self.analysis.program.parameters.keys() - seen
            seen |= new
            out[layer] = sum(static_bytes_of(types[n], each) for n in new)
        return out
