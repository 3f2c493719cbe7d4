"""How long the parts of a step take, and how much of their collectives is exposed.

A rank computes and runs collectives. Compute waits for some of them (`collectives_s`). The others
run beside it (`overlapped_s`) and slow it down by a fraction f: h seconds beside collectives do
compute of h / (1 + f) seconds. A host launches all of it in `host_s`, which compute cannot
overtake. With c of compute, at least host_s - collectives_s, and o of overlapped collectives
(`PartWork.duration`):

    hidden    h = min(o, c (1 + f))
    compute   c + h f / (1 + f)
    exposed   collectives_s + o - h
    time      compute + exposed = collectives_s + max(o, c + o f / (1 + f))

Gradient sync may run beside the backward of the last microbatch. `sync_s` seconds are divided into
n equal buckets, and bucket j may start once j / n of that backward is done. With an idle lane and a
backward of T seconds, max(sync_s / n, sync_s - T (n - 1) / n) is left after the backward; with one
bucket, all of it. If buckets differ, the last one is left: n = sync_s / (seconds of the last one),
which need not be whole. The lane first finishes the overlapped collectives of that backward and the
sync of the device's other stages. The part hidden in that backward slows it as above. The rest runs
beside the following steps (`Engine` in `engine.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.schedule import Kind


class PartDuration(NamedTuple):
    """Seconds that a part of a step takes; `hidden_s` of collectives are inside `compute_s`."""

    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def time_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class PartWork:
    """Seconds of work of a rank: its compute, and collectives inside its stage.

    host_s: what the interpreter takes to launch all of it. Where that is longer, compute waits.
    Of its compute, `loaded_s` depend on the documents of a microbatch (`StageTimes.loads`).
    """

    compute_s: float = 0.0
    collectives_s: float = 0.0
    overlapped_s: float = 0.0
    host_s: float = 0.0
    loaded_s: float = 0.0

    def duration(
        self, slowdown_fraction: float = 0.0, compute_factor: float = 1.0, load: float = 1.0
    ) -> PartDuration:
        """How long it takes, with compute that takes `compute_factor` times as long, and `load`
        times the mean of what depends on documents."""
        of_load_s = (self.compute_s + (load - 1) * self.loaded_s) * compute_factor
        compute_s = max(of_load_s, self.host_s - self.collectives_s)
        hidden_s = min(self.overlapped_s, compute_s * (1 + slowdown_fraction))
        return PartDuration(
            compute_s + hidden_s * slowdown_fraction / (1 + slowdown_fraction),
            self.collectives_s + self.overlapped_s - hidden_s,
            hidden_s,
        )

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(
            self.compute_s + other.compute_s,
            self.collectives_s + other.collectives_s,
            self.overlapped_s + other.overlapped_s,
            self.host_s + other.host_s,
            self.loaded_s + other.loaded_s,
        )

    def times(self, n: float) -> PartWork:
        """This work n times."""
        return PartWork(
            n * self.compute_s,
            n * self.collectives_s,
            n * self.overlapped_s,
            n * self.host_s,
            n * self.loaded_s,
        )

    def split(self) -> SplitBackward:
        """A backward in two: half of its compute, one matmul of each two, is for parameters."""
        half = PartWork(self.compute_s / 2, 0.0, 0.0, self.host_s / 2, self.loaded_s / 2)
        first = replace(half, collectives_s=self.collectives_s, overlapped_s=self.overlapped_s)
        return SplitBackward(first, half)


@dataclass(frozen=True)
class SplitBackward:
    """A backward in two parts: gradients of received tensors, and gradients of parameters."""

    input: PartWork
    weight: PartWork


@dataclass(frozen=True)
class StageTimes:
    """How long the parts of a step take on one stage; `forward` and `backward` of one microbatch.

    update_s                     the optimizer
    sync_s, n_sync_buckets       gradient sync beside the last backward; `after` comes later
    overlap_slowdown_fraction    extra time of compute beside collectives, as a fraction
    static_bytes, kept_bytes     of a rank: held all the time, and per microbatch in flight
    loads                        of each microbatch: its work that depends on documents, over the
                                 mean; none if all are equal
    """

    n_ranks: int
    before: PartWork
    forward: PartWork
    backward: PartWork | SplitBackward
    after: PartWork
    update_s: float
    sync_s: float = 0.0
    n_sync_buckets: float = 1.0
    overlap_slowdown_fraction: float = 0.0
    static_bytes: float = 0.0
    kept_bytes: float = 0.0
    loads: tuple[float, ...] = ()

    def load(self, microbatch: int) -> float:
        return self.loads[microbatch] if self.loads else 1.0

    @property
    def mean_load(self) -> float:
        """Above 1 if the rank has more than its share of a step."""
        return math.fsum(self.loads) / len(self.loads) if self.loads else 1.0

    def of(self, kind: Kind) -> PartWork:
        """The time of a compute of this kind; a whole backward is the sum of its two parts."""
        if kind == "forward":
            return self.forward
        if isinstance(self.backward, PartWork):
            assert kind == "backward", f"a {kind} needs a backward in two parts"
            return self.backward
        match kind:
            case "backward":
                return self.backward.input + self.backward.weight
            case "backward_input":
                return self.backward.input
            case _:
                return self.backward.weight


@dataclass(frozen=True)
class TieTimes:
    """Seconds of an exchange of tied gradients: between two stages, then inside each of them."""

    stages: tuple[int, int]
    exchange_s: float
    inside_s: tuple[float, float]
