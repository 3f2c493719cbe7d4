"""One simulated step: when each of the runtime's own actions starts and ends.

    before      every stage gathers its parameters                              once
    schedule    the actions of a schedule, in the executor's order:
                  compute    waits for the messages that it reads, then runs (`times.py`)
                  messages   consecutive ones are posted at once, in no device time; a transfer
                             starts when both ends are posted and the sender's earlier
                             transfers are over
                At most as many posted batches are under way as there are devices
                (`Crossings.post` in `runtime/collectives/crossings.py`).
                Gradient sync may run beside the last backward (`times.py`).
    after       gradients to storage; tied gradients between two stages at a time; the loss on
                all ranks; the optimizer                                        once

A device is the set of ranks that share a row of the schedule, timed by the busiest of them. It runs
one stage, or several if the schedule is interleaved. At any time it computes, runs collectives that
compute waits for, waits for a transfer under way, or is idle:

    step_time_s = compute_s + collectives_s + waited_s + update_s + idle_s      on every device
    bubble      = sum over devices of n_ranks idle_s / (n_ranks of all x step_time_s)
                                                                          (`Timeline.bubble`)

With equal stages, free messages and nothing before or after, the bubble is the textbook's
(p - 1) / (m + p - 1), or (p - 1) / (v m + p - 1) with v chunks per device. Transfers and
collectives on the same link do not slow each other down.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence

from autopar.cost.simulate.engine import Engine, OverlappedSync, Route, SimulatedDevice
from autopar.cost.simulate.events import DeviceTotals, Event, StepRecord, collective_events
from autopar.cost.simulate.timeline import Timeline
from autopar.cost.simulate.times import PartDuration, PartWork, StageTimes, TieTimes
from autopar.errors import OptionError
from autopar.schedule import GRADIENTS_DONE, Action, Kind, Schedule, Script, script_of

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
        assert len(stages) == len(script.devices), "a schedule of other stages"
        self.script, self.stages, self.slow = script, stages, slow
        self.durations = [self._durations(device, jitter) for device in range(len(script.rows))]
        self.devices = [
            SimulatedDevice(
                row, [duration.time_s for duration in self.durations[i]], self._overlapped_syncs(i)
            )
            for i, row in enumerate(script.rows)
        ]
        first = [script.devices.index(device) for device in range(len(script.rows))]
        self.totals = [DeviceTotals(stages[stage].n_ranks) for stage in first]
        self.engine = Engine(script, self.devices, _routes(script, message_s))
        self.once: list[Event] = []

    def record(self) -> StepRecord:
        return StepRecord(
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
        def of(kind: Kind, stage: int, factor: float, load: float) -> PartDuration:
            times = self.stages[stage]
            return times.of(kind).duration(times.overlap_slowdown_fraction, factor, load)

        durations = []
        for step in self.script.rows[device]:
            factor = slow * (1 + fraction * drawn.random()) if fraction else slow
            if (action := step.compute) is None:
                durations.append(PartDuration())
                continue
            load = self.stages[action.stage].load(action.microbatch)
            durations.append(of(action.kind, action.stage, factor, load))
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
        device = self.script.devices[stage]
        slowdown = self.stages[stage].overlap_slowdown_fraction
        duration = work.duration(slowdown, self._factor(device))
        self._advance(device, action, duration)
        self._count(device, [duration])

    def together(self, stages: Iterable[int], action: str, time_s: float) -> None:
        """A collective of the devices of some stages; it starts when the last of them is ready."""
        devices = sorted({self.script.devices[stage] for stage in stages})
        start_s = max(self.devices[device].clock_s for device in devices)
        for device in devices:
            self.devices[device].clock_s = start_s
            duration = PartDuration(exposed_s=time_s)
            self._advance(device, action, duration)
            self._count(device, [duration])

    def update(self, stage: int, time_s: float) -> None:
        """The optimizer."""
        device = self.script.devices[stage]
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
    devices = script.devices
    routes = [
        Route(message_s(send), devices[send.stage], devices[send.partner.stage])
        for send in script.channels
    ]
    return [route for route in routes for _ in range(script.n_microbatches)]


def simulate(
    schedule: Schedule | Script,
    stages: Sequence[StageTimes],
    message_s: Callable[[Action], float] | float = 0.0,
    ties: Sequence[TieTimes] = (),
    loss_s: float = 0.0,
    *,
    slow: tuple[int, float] | None = None,
    jitter: tuple[float, int] | None = None,
    sends_as_made: bool = False,
) -> Timeline:
    """Simulate one step of a valid schedule, or of its script (`script_of`), which can be reused.

    stages          the times of each stage
    message_s       seconds of a send's transfer, equal for all microbatches; or one number for all
                    sends. A schedule without messages gets those of a chain of stages.
    loss_s          seconds to give the loss to all ranks
    slow            (device, factor): its compute takes factor times as long
    jitter          (fraction, seed): every compute takes longer by up to this fraction of itself
    sends_as_made   in a schedule without messages, send each one as soon as it is made

    Raises `OptionError` for a slow device that does not exist, and for a `slow` or `jitter` that
    would speed compute up.
    """
    _check_options(len(schedule.rows), slow, jitter)
    if isinstance(schedule, Schedule):
        schedule = script_of(schedule, sends_as_made)
    simulation = StepSimulation(
        schedule, stages, message_s if callable(message_s) else lambda send: message_s, slow, jitter
    )
    for stage, times in enumerate(stages):
        simulation.work(stage, "gather parameters", times.before)
    simulation.actions()
    for stage, times in enumerate(stages):
        simulation.work(stage, "sync gradients", times.after)
    for tie in ties:
        simulation.together(tie.stages, "tied gradients", tie.exchange_s)
        for stage, inside_s in zip(tie.stages, tie.inside_s, strict=True):
            simulation.work(stage, "tied gradients", PartWork(0.0, inside_s))
    if len(schedule.rows) > 1:
        simulation.together(range(len(stages)), "loss", loss_s)
    for stage, times in enumerate(stages):
        simulation.update(stage, times.update_s)
    return Timeline(
        simulation.record(),
        tuple(simulation.totals),
        max(device.clock_s for device in simulation.devices),
    )


def _check_options(
    n_devices: int, slow: tuple[int, float] | None, jitter: tuple[float, int] | None
) -> None:
    if slow is not None and not (0 <= slow[0] < n_devices and slow[1] >= 1):
        raise OptionError(
            f"slow={slow!r} is not one of {n_devices} devices and a factor of at least 1",
            hint="slow=(0, 1.2): compute of the first takes a fifth longer",
        )
    if jitter is not None and not jitter[0] >= 0:
        raise OptionError(
            f"jitter={jitter!r} is not a fraction of at least 0 and a seed",
            hint="jitter=(0.1, 0): every compute takes up to a tenth longer",
        )
