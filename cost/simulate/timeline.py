"""A simulated step: what every device did when, and what that adds up to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from autopar.schedule import Script

Lane = Literal["compute", "collectives", "p2p"]
_US_PER_S = 1e6


@dataclass(frozen=True)
class Event:
    """What a device does from `start_s` to `end_s`; a message is listed at its sender."""

    device: int
    action: str
    start_s: float
    end_s: float
    lane: Lane = "compute"

    @property
    def is_message(self) -> bool:
        return self.lane == "p2p"


@dataclass
class Totals:
    """Seconds of a device over the step, by what it does.

    collectives_s   that compute waits for
    hidden_s        of collectives beside compute, inside `compute_s`
    waited_s        for messages under way; `sending_s` may be hidden
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
class Record:
    """When the steps of a script ran and its messages moved; and what came before and after."""

    script: Script
    starts: list[list[float]]
    ends: list[list[float]]
    left_at: list[float]
    arrived_at: list[float]
    once: list[Event] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        yield from self.once
        for device, row in enumerate(self.script.rows):
            times = zip(row, self.starts[device], self.ends[device], strict=True)
            for step, start_s, end_s in times:
                if step.compute is not None:
                    yield Event(device, str(step.compute), start_s, end_s)
        n_devices = len(self.script.rows)
        moves = zip(self.left_at, self.arrived_at, strict=True)
        for message, (start_s, end_s) in enumerate(moves):
            send = self.script.send(message)
            yield Event(send.stage % n_devices, str(send), start_s, end_s, "p2p")


@dataclass(frozen=True)
class Timeline:
    """One simulated step. Times of a rank are those of the busiest device.

    A device is the ranks that share a row of the schedule: a stage, unless it is interleaved.
    """

    record: Record = field(repr=False)
    devices: tuple[Totals, ...]
    step_time_s: float

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Everything that takes time, in order of start."""
        return tuple(sorted(self.record.events(), key=lambda e: (e.start_s, e.end_s, e.device)))

    @property
    def busiest(self) -> Totals:
        """The device with the most compute and communication."""
        return max(self.devices, key=lambda device: device.busy_s)

    @property
    def compute_time_s(self) -> float:
        return self.busiest.compute_s

    @property
    def comm_time_s(self) -> float:
        return self.busiest.comm_s

    @property
    def exposed_comm_s(self) -> float:
        return self.busiest.exposed_comm_s

    @property
    def bubble(self) -> float:
        """Idle time / total, over all ranks; 0 where one device never waits for another."""
        total_s = self.step_time_s * sum(device.n_ranks for device in self.devices)
        if len(self.devices) == 1 or not total_s:
            return 0.0
        return sum(d.n_ranks * self.idle_s(i) for i, d in enumerate(self.devices)) / total_s

    def idle_s(self, device: int) -> float:
        """Seconds in which a device neither works nor waits for a transfer under way."""
        d = self.devices[device]
        worked_s = d.compute_s + d.collectives_s + d.waited_s + d.update_s
        return max(self.step_time_s - worked_s, 0.0)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the events for chrome://tracing or Perfetto: a process per device."""
        entries = [
            {
                "name": e.action, "ph": "X", "pid": e.device, "tid": int(e.is_message),
                "ts": e.start_s * _US_PER_S, "dur": (e.end_s - e.start_s) * _US_PER_S,
            }
            for e in self.events
        ]  # fmt: skip
        names = [
            {"name": "process_name", "ph": "M", "pid": k, "args": {"name": f"stage {k}"}}
            for k in range(len(self.devices))
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*names, *entries]}), encoding="utf-8")
