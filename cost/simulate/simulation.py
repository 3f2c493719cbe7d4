"""The parts of a simulated step: work before the schedule, the schedule, work after it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence

from autopar.cost.simulate.engine import Engine, OverlappedSync, Route, SimulatedDevice
from autopar.cost.simulate.events import DeviceTotals, Event, Record, collective_events
from autopar.cost.simulate.times import PartDuration, PartWork, StageTimes
from autopar.schedule import GRADIENTS_DONE, Action, Kind, Script

# Seconds of a send's transfer, equal for all microbatches.
MessageTime = Callable[[Action], float]


class StepSimulation:
    """The devices of a step, and what they have done so far; `slow` and `jitter` as in `simulate`.

    Call the parts in the order in which they happen: each advances the clocks of its devices.
    """

    def __init__(
        self,
        script: Script,
        stages: Sequence[StageTimes],
        message_s: MessageTime,
        slow: tuple[int, float] | None = None,
        jitter: tuple[float, int] | None = None,
    ) -> None:
        assert len(stages) % len(script.rows) == 0, "a schedule of other stages"
        self.script, self.stages, self.slow = script, stages, slow
        self.durations = [self._durations(device, jitter) for device in range(len(script.rows))]
        self.devices = [
            SimulatedDevice(
                row, [duration.time_s for duration in self.durations[i]], self._overlapped_syncs(i)
            )
            for i, row in enumerate(script.rows)
        ]
        self.totals = [DeviceTotals(stages[i].n_ranks) for i in range(len(script.rows))]
        self.engine = Engine(script, self.devices, _routes(script, message_s))
        self.once: list[Event] = []

    def record(self) -> Record:
        return Record(
            self.script,
            self.stages,
            self.durations,
            [device.starts for device in self.devices],
            [device.ends for device in self.devices],
            self.engine.left_at,
            self.engine.arrived_at,
            self.once,
        )

    def _factor(self, device: int) -> float:
        """How many times as long compute takes on a device."""
        return self.slow[1] if self.slow is not None and self.slow[0] == device else 1.0

    def _durations(self, device: int, jitter: tuple[float, int] | None) -> list[PartDuration]:
        """The duration of every step of a device."""
        fraction, seed = jitter or (0.0, 0)
        drawn = random.Random(f"{seed} {device}")
        slow = self._factor(device)

        @functools.cache
        def of(kind: Kind, stage: int, factor: float) -> PartDuration:
            times = self.stages[stage]
            return times.of(kind).duration(times.overlap_slowdown_fraction, factor)

        durations = []
        for step in self.script.rows[device]:
            factor = slow * (1 + fraction * drawn.random()) if fraction else slow
            action = step.compute
            durations.append(of(action.kind, action.stage, factor) if action else PartDuration())
        return durations

    def _overlapped_syncs(self, device: int) -> dict[int, OverlappedSync]:
        """Gradient sync by the step that it starts beside: the last backward of its stage."""
        last: dict[int, tuple[int, Kind]] = {}
        for at, step in enumerate(self.script.rows[device]):
            if step.compute is not None and step.compute.kind in GRADIENTS_DONE:
                last[step.compute.stage] = at, step.compute.kind
        found = {}
        for stage, (at, kind) in last.items():
            times = self.stages[stage]
            if times.sync_s:
                found[at] = OverlappedSync(
                    times.sync_s,
                    times.n_sync_buckets,
                    times.of(kind).overlapped_s,
                    times.overlap_slowdown_fraction,
                )
        return found

    def work(self, stage: int, action: str, work: PartWork) -> None:
        """Compute and collectives of a stage, outside the schedule."""
        device = self._device_of(stage)
        slowdown = self.stages[stage].overlap_slowdown_fraction
        duration = work.duration(slowdown, self._factor(device))
        self._advance(device, action, duration)
        self._count(device, [duration])

    def together(self, stages: Iterable[int], action: str, time_s: float) -> None:
        """A collective of the devices of some stages; it starts when the last of them is ready."""
        devices = sorted({self._device_of(stage) for stage in stages})
        start_s = max(self.devices[device].clock_s for device in devices)
        for device in devices:
            self.devices[device].clock_s = start_s
            duration = PartDuration(exposed_s=time_s)
            self._advance(device, action, duration)
            self._count(device, [duration])

    def update(self, stage: int, time_s: float) -> None:
        """The optimizer."""
        device = self._device_of(stage)
        time_s *= self._factor(device)
        self._advance(device, "optimizer", PartDuration(time_s))
        self.totals[device].update_s += time_s

    def actions(self) -> None:
        """Run the schedule, and then the gradient sync that is still to do."""
        self.engine.run()
        for route in self.engine.routes:
            self.totals[route.sender].sending_s += route.time_s
        for i, (device, totals) in enumerate(zip(self.devices, self.totals, strict=True)):
            self._count(i, self.durations[i])
            totals.waited_s += device.waited_s
            for slot in device.sync_slots:
                totals.compute_s += slot.slowed_s
                self.once.append(
                    Event(i, "sync gradients", slot.start_s, slot.end_s, "collectives")
                )
            exposed_s = max(device.lane_free_s - device.clock_s, 0.0)
            totals.collectives_s += exposed_s
            totals.hidden_s += sum(b.sync_s for b in device.overlapped_syncs.values()) - exposed_s
            device.clock_s += exposed_s

    def _device_of(self, stage: int) -> int:
        return stage % len(self.devices)

    def _advance(self, device: int, action: str, duration: PartDuration) -> None:
        start_s = self.devices[device].clock_s
        end_s = self.devices[device].clock_s = start_s + duration.time_s
        if duration.compute_s:
            self.once.append(Event(device, action, start_s, end_s))
        self.once += collective_events(device, action, start_s, duration)

    def _count(self, device: int, durations: Sequence[PartDuration]) -> None:
        totals = self.totals[device]
        totals.compute_s += sum(s.compute_s for s in durations)
        totals.collectives_s += sum(s.exposed_s for s in durations)
        totals.hidden_s += sum(s.hidden_s for s in durations)


def _routes(script: Script, message_s: MessageTime) -> list[Route]:
    """The route of every message; all microbatches take the time of microbatch 0."""
    n_devices = len(script.rows)
    routes = [
        Route(message_s(send), send.stage % n_devices, send.partner.stage % n_devices)
        for send in script.channels
    ]
    return [route for route in routes for _ in range(script.n_microbatches)]
