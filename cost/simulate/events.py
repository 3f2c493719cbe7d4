"""The events of a simulated step, and the bytes that devices hold meanwhile.

A device has three lanes. An action is on the lane `compute` from its start to its end. Its
collectives are on the lane `collectives`, drawn as if they came first. Messages are on the lane
`p2p` of their sender.

A device holds its static bytes all the time. It also keeps bytes of each microbatch from the start
of a stage's forward to the end of its backward (`StepRecord.memory`):

    size_bytes(t) = sum over its stages of static_bytes + kept_bytes x (microbatches in flight at t)

With equal stages the peak is static + in_flight(schedule, device) x kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost.simulate.times import PartDuration, StageTimes
from autopar.schedule import GRADIENTS_DONE, Script

Lane = Literal["compute", "collectives", "p2p"]
LANES: tuple[Lane, ...] = ("compute", "collectives", "p2p")


@dataclass(frozen=True)
class Event:
    """What a device does from `start_s` to `end_s`; a message belongs to its sender."""

    device: int
    action: str
    start_s: float
    end_s: float
    lane: Lane = "compute"

    @property
    def is_message(self) -> bool:
        return self.lane == "p2p"


@dataclass
class DeviceTotals:
    """Seconds of a device over the step, by what it does.

    collectives_s   collectives that compute waits for
    hidden_s        collectives beside other work
    waited_s        waiting for messages under way
    sending_s       transfers of its own messages, hidden or not
    """

    n_ranks: int
    compute_s: float = 0.0
    collectives_s: float = 0.0
    hidden_s: float = 0.0
    waited_s: float = 0.0
    update_s: float = 0.0
    sending_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Compute and communication, hidden or not."""
        return self.compute_s + self.comm_s + self.update_s

    @property
    def comm_s(self) -> float:
        return self.collectives_s + self.hidden_s + self.sending_s

    @property
    def exposed_comm_s(self) -> float:
        return self.collectives_s + self.waited_s


@dataclass
class StepRecord:
    """When a script's steps ran and its messages moved; `once`: events before and after it."""

    script: Script
    stages: Sequence[StageTimes]
    durations: Sequence[Sequence[PartDuration]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    left_at: Sequence[float]
    arrived_at: Sequence[float]
    once: list[Event] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        yield from self.once
        for device, row in enumerate(self.script.rows):
            for at, step in enumerate(row):
                if step.compute is None:
                    continue
                name, start_s = str(step.compute), self.starts[device][at]
                yield Event(device, name, start_s, self.ends[device][at])
                yield from collective_events(
                    device, f"collectives of {name}", start_s, self.durations[device][at]
                )
        for message, (start_s, end_s) in enumerate(zip(self.left_at, self.arrived_at, strict=True)):
            send = self.script.send(message)
            yield Event(self.script.devices[send.stage], str(send), start_s, end_s, "p2p")

    def memory(self, device: int) -> Iterator[tuple[float, float]]:
        """(time_s, size_bytes) at every change of the bytes that a device holds."""
        placed = zip(self.stages, self.script.devices, strict=True)
        now_bytes = sum(times.static_bytes for times, at in placed if at == device)
        yield 0.0, now_bytes
        for at, step in enumerate(self.script.rows[device]):
            if step.compute is None:
                continue
            kept_bytes = self.stages[step.compute.stage].kept_bytes
            if step.compute.kind == "forward":
                now_bytes += kept_bytes
                yield self.starts[device][at], now_bytes
            elif step.compute.kind in GRADIENTS_DONE:
                now_bytes -= kept_bytes
                yield self.ends[device][at], now_bytes


def collective_events(
    device: int, name: str, start_s: float, duration: PartDuration
) -> Iterator[Event]:
    """The event on the collective lane of an action that starts at `start_s`."""
    time_s = duration.exposed_s + duration.hidden_s
    if time_s:
        yield Event(device, name, start_s, start_s + time_s, "collectives")
