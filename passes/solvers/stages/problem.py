"""The pipeline problem on plain numbers: layers cut into stages, a configuration for each.

With S stages, stage s holding layers first..last under configuration c, B microbatches and 1F1B's
in-flight count of min(B, S - s) microbatches on stage s (counted from 0):

    minimise  sum_s time_s + (B - 1) max_s time_s + max_s once_s
    such that static_bytes + min(B, S - s) activation_bytes <= memory_bytes  on every stage
              the stages cover the layers in order, and use exactly n_devices together

(`StageProblem.evaluate`, `StageProblem.stage_bytes`). A configuration is anything that has a number
of devices: a submesh, how it is viewed, what is recomputed. Stages hold consecutive devices in
their order.

With `node_devices`, a stage smaller than a node lies inside one, and a larger one begins with a
node (`StageProblem.may_begin`). Power-of-two shares of a node and whole nodes can always be ordered
so (Zheng et al., "Alpa", OSDI 2022, appendix A). Only such orders are plans. What a stage costs may
depend on where in its node it begins (`config_offsets`), since that decides whether its neighbours
are on other nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.problem import (
    BUDGET_REL,
    SAME_OPTIMUM_REL,
    BoolArray,
    FloatArray,
    Infeasible,
    ProblemError,
)

Index = tuple[NDArray[np.intp] | int, ...] | EllipsisType


class StageChoice(NamedTuple):
    """One stage: its layers, both ends included, and its configuration."""

    first: int
    last: int
    config: int


@dataclass(frozen=True)
class StagePlan:
    """Stages in order, what they cost and what is proven about it.

    `t_max_s` is the slowest stage's time, `once_s` the largest cost per step, `peak_bytes` the
    largest need of one device. `bound_s` is a proven lower bound on every feasible plan, `gap` the
    relative distance of `objective_s` to it.
    """

    stages: tuple[StageChoice, ...]
    objective_s: float
    t_max_s: float
    once_s: float
    peak_bytes: float
    bound_s: float
    gap: float


@dataclass(frozen=True, eq=False)
class StageProblem:
    """The problem of the module docstring. Arrays are [first, last, config]; last < first is not
    read.

    `time_s` is the time of one microbatch, `once_s` what a stage adds to each step, whatever the
    number of microbatches. `activation_bytes` are those of one microbatch in flight. Bytes are per
    device. An infinite `time_s` forbids a stage; the other arrays are not read there.
    `memory_bytes` None: no limit. `n_stages` None: any number. `node_devices` None: stages may
    begin anywhere. `config_offsets`: how many devices of its node may precede a stage of a
    configuration; None: any number that leaves it room.

    Raises `ProblemError` for wrong shapes, NaN, negative or infinite numbers, counts below 1.
    """

    time_s: FloatArray
    once_s: FloatArray
    static_bytes: FloatArray
    activation_bytes: FloatArray
    config_devices: tuple[int, ...]
    n_devices: int
    n_microbatches: int
    memory_bytes: float | None = None
    n_stages: int | None = None
    node_devices: int | None = None
    config_offsets: tuple[frozenset[int] | None, ...] | None = None

    def __post_init__(self) -> None:
        given = [n for n in (self.n_stages, self.node_devices) if n is not None]
        counts = (self.n_devices, self.n_microbatches, *self.config_devices, *given)
        if not self.config_devices or min(counts) < 1:
            raise ProblemError(
                f"devices {self.n_devices}, microbatches {self.n_microbatches}, devices per"
                f" configuration {self.config_devices}, stages {self.n_stages} and devices per"
                f" node {self.node_devices} must be at least 1"
            )
        if self.memory_bytes is not None and not self.memory_bytes >= 0:
            raise ProblemError(f"memory_bytes must be at least 0: {self.memory_bytes}")
        if self.config_offsets is not None and (
            self.node_devices is None or len(self.config_offsets) != len(self.config_devices)
        ):
            raise ProblemError("config_offsets needs node_devices, and one entry per configuration")
        n = len(self.time_s)
        shape = (n, n, len(self.config_devices))
        upper = np.triu(np.ones((n, n), dtype=bool))[:, :, None]
        for name in ("time_s", "once_s", "static_bytes", "activation_bytes"):
            array = getattr(self, name)
            if array.shape != shape or n == 0:
                raise ProblemError(f"{name}: an array of shape {array.shape} should be {shape}")
            read = upper if name == "time_s" else upper & np.isfinite(self.time_s)
            values = array[np.broadcast_to(read, shape)]
            if np.isnan(values).any() or (values < 0).any():
                raise ProblemError(
                    f"{name}: a value is NaN or negative",
                    hint="an estimate failed; forbid a stage with time_s = inf instead",
                )
            if name != "time_s" and np.isinf(values).any():
                raise ProblemError(f"{name}: infinite", hint="forbid a stage with time_s = inf")

    @property
    def n_layers(self) -> int:
        return len(self.time_s)

    @property
    def n_levels(self) -> int:
        """So many numbers of stages after one are told apart."""
        return self.n_stages or max(1, min(self.max_stages, self.n_microbatches))

    @property
    def max_stages(self) -> int:
        """An upper bound on the stages of a plan: each takes a layer, and devices."""
        return min(self.n_layers, self.n_devices // min(self.config_devices))

    def offsets(self, config: int) -> frozenset[int] | None:
        return None if self.config_offsets is None else self.config_offsets[config]

    def may_begin(self, config: int, n_left: int) -> bool:
        """May a stage of this configuration come next when `n_left` devices are left?"""
        size, offsets = self.config_devices[config], self.offsets(config)
        if size > n_left or self.node_devices is None:
            return size <= n_left
        before = (self.n_devices - n_left) % self.node_devices
        has_room = before == 0 or before + size <= self.node_devices
        return has_room and (offsets is None or before in offsets)

    def stage_bytes(self, n_after: int | NDArray[np.int64], stages: Index = ...) -> FloatArray:
        """[first, last, config]: the bytes per device of a stage that `n_after` stages follow; or
        those that `stages` index."""
        n_in_flight = np.minimum(self.n_microbatches, n_after + 1)
        size: FloatArray = self.static_bytes[stages] + n_in_flight * self.activation_bytes[stages]
        return size

    @property
    def limit_bytes(self) -> float:
        """The most bytes that a device may hold: the memory, to `BUDGET_REL`."""
        return math.inf if self.memory_bytes is None else self.memory_bytes * (1 + BUDGET_REL)

    def possible(self) -> BoolArray:
        """[first, last, config]: is the stage allowed, whatever the memory?"""
        n = self.n_layers
        upper = np.triu(np.ones((n, n), dtype=bool))[:, :, None]
        enough = np.array(self.config_devices) <= self.n_devices
        return upper & enough & np.isfinite(self.time_s)

    def evaluate(self, stages: Sequence[StageChoice], bound_s: float | None = None) -> StagePlan:
        """The cost of a legal plan, summed exactly. `bound_s` None: it is proven optimal."""
        times = [float(self.time_s[s]) for s in stages]
        once_s = max(float(self.once_s[s]) for s in stages)
        objective = math.fsum([*times, (self.n_microbatches - 1) * max(times), once_s])
        sizes = [float(self.stage_bytes(n_after, s)) for n_after, s in enumerate(reversed(stages))]
        assert math.isfinite(objective) and max(sizes) <= self.limit_bytes, stages
        bound, gap = objective, 0.0
        if bound_s is not None and bound_s < objective * (1 - SAME_OPTIMUM_REL):
            bound, gap = bound_s, 1 - bound_s / objective
        return StagePlan(tuple(stages), objective, max(times), once_s, max(sizes), bound, gap)


def too_little_memory(problem: StageProblem, min_bytes: float) -> Infeasible:
    """The `Infeasible` of a problem without plans. `min_bytes` is the least device memory with
    which some plan fits (infinite: none ever does)."""
    if math.isinf(min_bytes):
        count = "no stages" if problem.n_stages is None else f"no {problem.n_stages} stages"
        return Infeasible(
            f"{count} of {sorted(set(problem.config_devices))} devices cover"
            f" {problem.n_layers} layers on exactly {problem.n_devices} devices",
            None,
        )
    assert problem.memory_bytes is not None
    return Infeasible(
        f"the leanest pipeline needs {min_bytes:.0f} bytes per device, the memory is"
        f" {problem.memory_bytes:.0f}: {min_bytes - problem.memory_bytes:.0f} are missing",
        min_bytes,
    )
