"""The simulator's clockwork: devices that go on until they must wait, messages that move."""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autopar.cost.simulate.timeline import Event, Record, Totals
from autopar.cost.simulate.times import Shown, Spent, StageTimes
from autopar.schedule import Action, Kind, Script

_NEVER = math.inf

# Of a send: how long its transfer takes; all microbatches alike.
MessageTime = Callable[[Action], float]


class _Route(NamedTuple):
    """Between devices; what passes there takes `time_s`."""

    time_s: float
    sender: int
    receiver: int


class Play:
    """The state of a simulation: every device's clock, and what was posted and moved.

    Messages are known by their number in the script. A device whose next step reads a message
    that has not moved is put down in `waits_for`, and taken up again when it moves.

    slow      (device, factor): compute of this device takes so much longer
    jitter    (fraction, seed): every compute takes longer, by up to this fraction of itself
    """

    def __init__(
        self,
        script: Script,
        stages: Sequence[StageTimes],
        message_s: MessageTime,
        slow: tuple[int, float] | None = None,
        jitter: tuple[float, int] | None = None,
    ) -> None:
        n_devices, n_messages = len(script.rows), len(script.sends)
        self.script, self.stages, self.slow = script, stages, slow
        self.totals = [Totals(stages[device].n_ranks) for device in range(n_devices)]
        self.once: list[Event] = []
        self.clock = [0.0] * n_devices
        self.lane_free = [0.0] * n_devices
        self.link_free = [0.0] * n_devices
        self.starts: list[list[float]] = [[] for _ in script.rows]
        self.ends: list[list[float]] = [[] for _ in script.rows]
        self.shown = [self._shown(device, jitter) for device in range(n_devices)]
        self.syncs = [self._syncs(device) for device in range(n_devices)]
        self.routes = _routes(script, message_s)
        self.sent_at = [0.0] * n_messages
        self.received_at = [_NEVER] * n_messages
        self.left_at = [0.0] * n_messages
        self.arrived_at = [_NEVER] * n_messages
        self.n_posted = [0] * n_devices
        self.queues: list[deque[int]] = [deque() for _ in script.rows]
        self.batches: list[deque[int]] = [deque() for _ in script.rows]
        self.waits_for: list[int | None] = [None] * n_devices
        self.ready = list(range(n_devices))

    def device_of(self, stage: int) -> int:
        return stage % len(self.script.rows)

    # -- durations ---------------------------------------------------------------------------

    def _factor(self, device: int) -> float:
        """By how much compute of a device is slower."""
        return self.slow[1] if self.slow is not None and self.slow[0] == device else 1.0

    def _shown(self, device: int, jitter: tuple[float, int] | None) -> list[Shown]:
        """What every step of a device takes."""
        fraction, seed = jitter or (0.0, 0)
        drawn = random.Random(f"{seed} {device}")
        slow = self._factor(device)

        @functools.cache
        def of(kind: Kind, stage: int, factor: float) -> Shown:
            times = self.stages[stage]
            return times.of(kind).shown(times.overlap_slowdown_fraction, factor)

        shown = []
        for step in self.script.rows[device]:
            factor = slow * (1 + fraction * drawn.random()) if fraction else slow
            action = step.compute
            shown.append(of(action.kind, action.stage, factor) if action else Shown())
        return shown

    def _syncs(self, device: int) -> dict[int, int]:
        """Steps of a device that are the last backward of a stage -> that stage."""
        last: dict[int, int] = {}
        for at, step in enumerate(self.script.rows[device]):
            if step.compute is not None and step.compute.kind in ("backward", "backward_weight"):
                last[step.compute.stage] = at
        return {at: stage for stage, at in last.items() if self.stages[stage].sync_s}

    # -- once a step -------------------------------------------------------------------------

    def work(self, stage: int, action: str, spent: Spent) -> None:
        device = self.device_of(stage)
        slowdown = self.stages[stage].overlap_slowdown_fraction
        shown = spent.shown(slowdown, self._factor(device))
        self._advance(device, action, shown.time_s)
        self._count(device, shown)

    def together(self, stages: Iterable[int], action: str, time_s: float) -> None:
        """A collective that the devices of some stages start together."""
        devices = sorted({self.device_of(stage) for stage in stages})
        start_s = max(self.clock[device] for device in devices)
        for device in devices:
            self.clock[device] = start_s
            self._advance(device, action, time_s)
            self.totals[device].collectives_s += time_s

    def update(self, stage: int, time_s: float) -> None:
        device = self.device_of(stage)
        time_s *= self._factor(device)
        self._advance(device, "optimizer", time_s)
        self.totals[device].update_s += time_s

    def record(self) -> Record:
        return Record(self.script, self.starts, self.ends, self.left_at, self.arrived_at, self.once)

    def _advance(self, device: int, action: str, time_s: float) -> None:
        start_s = self.clock[device]
        self.clock[device] = start_s + time_s
        if time_s:
            self.once.append(Event(device, action, start_s, self.clock[device]))

    def _count(self, device: int, shown: Shown) -> None:
        totals = self.totals[device]
        totals.compute_s += shown.compute_s
        totals.collectives_s += shown.exposed_s
        totals.hidden_s += shown.hidden_s

    # -- the schedule ------------------------------------------------------------------------

    def actions(self) -> None:
        """All steps of all devices; a device that must wait lets the others go on."""
        while self.ready:
            self._go_on(self.ready.pop())
        stuck = [device for device, message in enumerate(self.waits_for) if message is not None]
        assert not stuck, f"devices {stuck} wait for ever: the schedule is not valid"
        for route in self.routes:
            self.totals[route.sender].sending_s += route.time_s
        for device, row in enumerate(self.shown):
            totals = self.totals[device]
            totals.compute_s += sum(shown.compute_s for shown in row)
            totals.collectives_s += sum(shown.exposed_s for shown in row)
            totals.hidden_s += sum(shown.hidden_s for shown in row)
            self._finish_sync(device)

    def _go_on(self, device: int) -> None:
        row, shown = self.script.rows[device], self.shown[device]
        starts, ends = self.starts[device], self.ends[device]
        while (at := len(starts)) < len(row):
            posts, reads, _ = row[at]
            if posts and self.n_posted[device] == at:
                self._post(device, posts)
            self.n_posted[device] = at + 1
            under_way = self.batches[device]
            if len(under_way) > len(self.clock):
                reads = (under_way[0], *reads)
            if reads and not self._wait(device, reads):
                return
            if len(under_way) > len(self.clock):
                under_way.popleft()
            start_s = self.clock[device]
            if at in self.syncs[device]:
                self._sync(device, at)
            end_s = self.clock[device] = start_s + shown[at].time_s
            starts.append(start_s)
            ends.append(end_s)

    def _post(self, device: int, posts: Sequence[int]) -> None:
        """Post a run of messages; the last of its sends stands for the batch."""
        now_s = self.clock[device]
        queue = self.queues[device]
        n_before = len(queue)
        for end in posts:
            if end >= 0:
                self.sent_at[end] = now_s
                queue.append(end)
            else:
                self.received_at[~end] = now_s
        if len(queue) > n_before:
            self.batches[device].append(queue[-1])
            self._move(device)
        for end in posts:
            if end < 0:
                self._move(self.routes[~end].sender)

    def _move(self, sender: int) -> None:
        """Everything that `sender` can send, in the order in which it posted it."""
        queue = self.queues[sender]
        while queue and (received_s := self.received_at[queue[0]]) < _NEVER:
            message = queue.popleft()
            start_s = max(self.link_free[sender], self.sent_at[message], received_s)
            self.left_at[message] = start_s
            time_s, *ends = self.routes[message]
            self.arrived_at[message] = self.link_free[sender] = start_s + time_s
            for device in ends:
                if self.waits_for[device] == message:
                    self.waits_for[device] = None
                    self.ready.append(device)

    def _wait(self, device: int, messages: Sequence[int]) -> bool:
        """Until all of `messages` have arrived; False where one has not even been sent."""
        for message in messages:
            if self.arrived_at[message] == _NEVER:
                self.waits_for[device] = message
                return False
        for message in sorted(messages, key=self.left_at.__getitem__):
            end_s, clock_s = self.arrived_at[message], self.clock[device]
            if end_s > clock_s:
                self.totals[device].waited_s += end_s - max(self.left_at[message], clock_s)
                self.clock[device] = end_s
        return True

    # -- gradients synchronised beside the last backward -------------------------------------

    def _sync(self, device: int, at: int) -> None:
        """Lay a stage's gradient sync beside the step, its last backward, that starts now."""
        times, shown = self.stages[self.syncs[device][at]], self.shown[device][at]
        n_buckets, slowdown = times.n_sync_buckets, times.overlap_slowdown_fraction
        start_s = self.clock[device]
        end_s = start_s + shown.time_s
        first_s = min(start_s + shown.time_s / n_buckets + shown.hidden_s, end_s)
        first_s = max(first_s, self.lane_free[device])
        beside_s = min(max(end_s - first_s, 0.0), times.sync_s * (n_buckets - 1) / n_buckets)
        slowed_s = beside_s * slowdown / (1 + slowdown)
        self.shown[device][at] = shown._replace(
            compute_s=shown.compute_s + slowed_s, hidden_s=shown.hidden_s + times.sync_s
        )
        lane_s = max(first_s + times.sync_s, end_s + slowed_s + times.sync_s / n_buckets)
        self.once.append(Event(device, "gradient sync", first_s, lane_s, "collectives"))
        self.lane_free[device] = lane_s

    def _finish_sync(self, device: int) -> None:
        """Wait for what is left of it."""
        exposed_s = max(self.lane_free[device] - self.clock[device], 0.0)
        self.totals[device].collectives_s += exposed_s
        self.totals[device].hidden_s -= exposed_s
        self.clock[device] += exposed_s


def _routes(script: Script, message_s: MessageTime) -> list[_Route]:
    """Of every message; `message_s` is asked once for each kind and pair of stages."""
    n_devices = len(script.rows)
    known: dict[tuple[Kind, int, int | None], _Route] = {}
    found = []
    for send in script.sends:
        key = send.kind, send.stage, send.peer
        if key not in known:
            target = send.partner.stage
            known[key] = _Route(message_s(send), send.stage % n_devices, target % n_devices)
        found.append(known[key])
    return found
