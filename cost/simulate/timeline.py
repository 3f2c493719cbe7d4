"""A simulated step: its totals, and ways to look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autopar.cost.simulate.drawing import svg
from autopar.cost.simulate.events import DeviceTotals, Event, StepRecord
from autopar.cost.simulate.trace import chrome_trace


@dataclass(frozen=True)
class Timeline:
    """One simulated step. Times of a rank are those of the busiest device.

    A device is the set of ranks that share a row of the schedule: one stage, or several if it is
    interleaved.
    """

    record: StepRecord = field(repr=False)
    devices: tuple[DeviceTotals, ...]
    step_time_s: float

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events, in order of start."""
        return tuple(sorted(self.record.events(), key=lambda e: (e.start_s, e.end_s, e.device)))

    @property
    def longest_device_s(self) -> float:
        """The longest time of a device from its first event's start to its last one's end.

        Messages do not count.
        """
        starts: dict[int, float] = {}
        ends: dict[int, float] = {}
        for event in self.events:
            if not event.is_message:
                starts.setdefault(event.device, event.start_s)
                ends[event.device] = max(ends.get(event.device, 0.0), event.end_s)
        return max((ends[device] - starts[device] for device in ends), default=0.0)

    @property
    def busiest_device(self) -> int:
        """The device with the most compute and communication."""
        return max(range(len(self.devices)), key=lambda k: self.devices[k].busy_s)

    def stages_on(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in order."""
        return tuple(k for k, at in enumerate(self.record.script.devices) if at == device)

    @property
    def busiest(self) -> DeviceTotals:
        return self.devices[self.busiest_device]

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
        """Idle time / total time, over all ranks; 0 with one device."""
        total_s = self.step_time_s * sum(device.n_ranks for device in self.devices)
        if len(self.devices) == 1 or not total_s:
            return 0.0
        return sum(d.n_ranks * self.idle_s(i) for i, d in enumerate(self.devices)) / total_s

    def idle_s(self, device: int) -> float:
        """Seconds in which a device does not work and waits for no transfer under way."""
        d = self.devices[device]
        worked_s = d.compute_s + d.collectives_s + d.waited_s + d.update_s
        return max(self.step_time_s - worked_s, 0.0)

    def memory(self, device: int) -> tuple[tuple[float, float], ...]:
        """(time_s, size_bytes) at every change of the bytes that a rank of a device holds."""
        return tuple(self.record.memory(device))

    def peak_bytes(self, device: int) -> float:
        """The most bytes that a rank of a device holds."""
        return max(size_bytes for _, size_bytes in self.record.memory(device))

    def names(self) -> list[str]:
        """The names of the devices, as reports print them."""
        what = "stage" if len(self.record.stages) == len(self.devices) else "device"
        return [f"{what} {i}" for i in range(len(self.devices))]

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the step as a trace for chrome://tracing or Perfetto."""
        memory = [self.memory(i) for i in range(len(self.devices))]
        Path(path).write_text(chrome_trace(self.names(), self.events, memory), encoding="utf-8")

    def to_svg(self, path: str | Path) -> None:
        """Write the step as an SVG drawing."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def svg(self) -> str:
        """A self-contained `<svg>` element, for a page or a file."""
        idle_s = [self.idle_s(i) for i in range(len(self.devices))]
        rows = dict(zip(self.names(), idle_s, strict=True))
        return svg(rows, self.events, self.step_time_s)
