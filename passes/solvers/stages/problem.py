"""The pipeline problem on plain numbers: layers cut into stages, a configuration for each.

A plan's stages hold consecutive layers and consecutive devices, in order. Its *span* is

    max_s  (sum of added_r over r < s)  +  max(work_s,  drained_s + 2 (sum of added_r over r > s))

(`span_s`). `work` is what all microbatches take on a stage, `added` what one of them takes, forward
and backward, with its messages to the next stage and back. No step is faster. The first microbatch
passes every stage before s, then s works, then the gradient of the last one passes back. With 1F1B
(`n_microbatches` m), a stage with j stages after it begins j + 1 forwards before its first
backward. So a step takes one after the other

    the first microbatch    from the first stage to the last, and back to s
    s                       up to the forward of the last microbatch; without the j forwards and the
                            j backwards that it does during the two others
    the last microbatch     from s to the last stage, and back to the first

On s that is work - j (work - added) / (m - 1), `drained`. What a stage does once per step is not in
the span: it may do so while it waits. The first stage never waits before its first microbatch, nor
after its last. So `work` and `added` of a first stage may include it. A configuration is anything
that has a number of devices: a submesh, and how it is viewed.

Both numbers may depend on how many stages come after one, because that decides how many
microbatches are in flight.

With `node_devices`, a stage smaller than a node lies inside one, and a larger one begins with a
node (`StageProblem.may_begin`). Power-of-two shares of a node and whole nodes can always be ordered
so (Zheng et al., "Alpa", OSDI 2022, appendix A). Only such orders are plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, Indices
from autopar.passes.solvers.problem import ProblemError


class StageChoice(NamedTuple):
    """One stage: its layers, both ends included, and its configuration."""

    first: int
    last: int
    config: int


@dataclass(frozen=True, eq=False)
class StageProblem:
    """The problem of the module docstring.

    first, last, config   [stages]: all that may be a stage, ordered by the first two
    work_s, added_s        [stages, levels]: seconds, at level j if j stages come after it. The last
                          level stands for all above it. Infinite ones forbid a stage
    config_devices        devices of each configuration
    n_microbatches        of 1F1B; None: nothing is known of the schedule

    `n_stages` None: any number; else there are as many levels. `node_devices` None: stages may
    begin anywhere. With `n_microbatches`, no plan has more stages than levels.

    Raises `ProblemError` for wrong shapes, NaN, negative numbers and counts below 1.
    """

    first: Indices
    last: Indices
    config: Indices
    work_s: Array
    added_s: Array
    config_devices: tuple[int, ...]
    n_layers: int
    n_devices: int
    n_stages: int | None = None
    node_devices: int | None = None
    n_microbatches: int | None = None

    def __post_init__(self) -> None:
        given = [n for n in (self.n_stages, self.node_devices) if n is not None]
        if min(self.n_layers, self.n_devices, *self.config_devices, *given) < 1:
            raise ProblemError(
                f"layers {self.n_layers}, devices {self.n_devices}, devices per configuration "
                f"{self.config_devices}, stages {self.n_stages} and devices per node "
                f"{self.node_devices} must be at least 1"
            )
        shape = len(self.first), self.n_stages or self.work_s.shape[-1]
        for name in ("work_s", "added_s"):
            array = getattr(self, name)
            if array.shape != shape:
                raise ProblemError(f"{name}: an array of shape {array.shape} should be {shape}")
            if np.isnan(array).any() or (array < 0).any():
                raise ProblemError(
                    f"{name}: a value is NaN or negative",
                    hint="an estimate failed; forbid a stage with work_s = inf instead",
                )
        least = min(self.config_devices)
        most = min(self.n_layers, self.n_devices // least, self.n_microbatches or 0)
        if self.n_stages is None and shape[1] < most:
            raise ProblemError(f"{shape[1]} levels, but plans have up to {most} stages")

    @property
    def n_levels(self) -> int:
        return self.work_s.shape[1]

    @property
    def is_exact(self) -> bool:
        """Is each level one number of stages?"""
        return self.n_stages is not None

    @cached_property
    def starts(self) -> Indices:
        """[first layer]: the index of the first stage that begins there; then the end."""
        return np.searchsorted(self.first, np.arange(self.n_layers + 1))

    @cached_property
    def drained_s(self) -> Array:
        """[stages, levels]: the part of `work_s` that comes on top of twice all later stages."""
        return drained_s(self.work_s, self.added_s, np.arange(self.n_levels), self.n_microbatches)

    def may_begin(self, config: int, n_left: int) -> bool:
        """May a stage of this configuration come next when `n_left` devices are left?"""
        size = self.config_devices[config]
        if size > n_left or self.node_devices is None:
            return size <= n_left
        before = (self.n_devices - n_left) % self.node_devices
        return before == 0 or before + size <= self.node_devices

    def choice(self, stage: int) -> StageChoice:
        return StageChoice(int(self.first[stage]), int(self.last[stage]), int(self.config[stage]))


def span_s(work_s: Array, added_s: Array, n_microbatches: int | None = None) -> float:
    """The span of stages in order, [stages] each; the module docstring has the formula."""
    if not np.isfinite(work_s).all():
        return math.inf
    done_s = np.cumsum(added_s)
    after = np.arange(len(work_s))[::-1]
    waits_s = drained_s(work_s, added_s, after, n_microbatches) + 2 * (done_s[-1] - done_s)
    return float((done_s - added_s + np.maximum(work_s, waits_s)).max())


def drained_s(work_s: Array, added_s: Array, n_after: Indices, n_microbatches: int | None) -> Array:
    """The part of stages' work that comes on top of twice all later stages, [..., n_after].

    Minus infinity where the first microbatch is not back before the forward of the last one.
    """
    m = n_microbatches or 0
    is_back = n_after + 1 < m
    share = np.where(is_back, n_after, 0) / max(m - 1, 1)
    return np.where(is_back, (1 - share) * work_s + share * added_s, -np.inf)
