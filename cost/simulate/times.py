"""How long the parts of a step take, and what of it shows.

A rank computes, and calls collectives: those that compute waits for (`collectives_s`) and those
that run beside it (`overlapped_s`), which slow it down while they do, by a fraction f of its
time: in h seconds beside collectives, compute of h / (1 + f) seconds is done. With c of compute
and o of overlapped collectives (`Spent.shown`):

    hidden    h = min(o, c (1 + f))
    compute   c + h f / (1 + f)
    exposed   collectives_s + o - h
    time      compute + exposed = collectives_s + max(o, c + o f / (1 + f))

Gradients that are synchronised beside the backward of the last microbatch: `sync_s` seconds in
n equal buckets, of which bucket j may start once j / n of that backward is done. So with an idle
lane and a backward of T seconds, what is left after it is max(sync_s / n, sync_s - T (n - 1) / n).
With one bucket, all of it. The lane takes it up after the overlapped collectives of that backward,
and after the sync of other stages of the device; what is hidden in that backward slows it as above,
what is left runs on beside whatever comes next (`engine.Engine`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedule import Kind


class Shown(NamedTuple):
    """Seconds of a stage's time; `hidden_s` of collectives are inside `compute_s`."""

    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def time_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class Spent:
    """Seconds of a rank: its own work, and collectives inside its stage."""

    compute_s: float = 0.0
    collectives_s: float = 0.0
    overlapped_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Where a collective beside it does not slow compute."""
        return self.shown().time_s

    def shown(self, slowdown_fraction: float = 0.0, compute_factor: float = 1.0) -> Shown:
        """What it takes, with compute that takes `compute_factor` as long."""
        compute_s = self.compute_s * compute_factor
        hidden_s = min(self.overlapped_s, compute_s * (1 + slowdown_fraction))
        return Shown(
            compute_s + hidden_s * slowdown_fraction / (1 + slowdown_fraction),
            self.collectives_s + self.overlapped_s - hidden_s,
            hidden_s,
        )

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.compute_s + other.compute_s,
            self.collectives_s + other.collectives_s,
            self.overlapped_s + other.overlapped_s,
        )


@dataclass(frozen=True)
class SplitBackward:
    """A backward in two parts: gradients of what the stage received, and of its parameters."""

    input: Spent
    weight: Spent


@dataclass(frozen=True)
class StageTimes:
    """How long the parts of a step take on one stage; `forward`, `backward` of a microbatch.

    update_s                     of the optimizer
    sync_s, n_sync_buckets       of gradients beside the last backward; `after` comes later
    overlap_slowdown_fraction    by how much of its time compute slows beside collectives
    static_bytes, kept_bytes     of a rank: always there, and of each microbatch in flight
    """

    n_ranks: int
    before: Spent
    forward: Spent
    backward: Spent | SplitBackward
    after: Spent
    update_s: float
    sync_s: float = 0.0
    n_sync_buckets: int = 1
    overlap_slowdown_fraction: float = 0.0
    static_bytes: float = 0.0
    kept_bytes: float = 0.0

    def of(self, kind: Kind) -> Spent:
        """Of a compute of this kind. A backward in two parts is their sum where it runs whole."""
        if kind == "forward":
            return self.forward
        if isinstance(self.backward, Spent):
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
    """An exchange of tied gradients: between two stages, then inside each of them."""

    stages: tuple[int, int]
    exchange_s: float
    inside_s: tuple[float, float]
