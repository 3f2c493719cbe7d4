"""The event loop: devices run until they must wait for a message, and messages move.

It knows a script and numbers: how long each step and each message takes. A device whose next step
reads a message that has not arrived is set aside until the message arrives. So each step is
examined only a few times, whatever the number of devices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.schedule import Script, ScriptStep

_NEVER = math.inf


class Route(NamedTuple):
    """The way of a message from one device to another; it takes `time_s`."""

    time_s: float
    sender: int
    receiver: int


class OverlappedSync(NamedTuple):
    """Gradient sync on the collective lane, which starts beside one step and may outlast it.

    overlapped_s   seconds of the step's own collectives on that lane
    """

    sync_s: float
    n_buckets: float
    overlapped_s: float
    slowdown_fraction: float


class SyncSlot(NamedTuple):
    """When an `OverlappedSync` runs, and by how much it slows its step."""

    start_s: float
    end_s: float
    slowed_s: float


@dataclass(slots=True)
class SimulatedDevice:
    """A device's steps, its progress, and its posted sends.

    beside      gradient sync by the step that it starts beside
    waits_for   the message that the device waits for
    queue       posted sends that have not left
    under_way   the last send of each posted batch that may not have arrived
    """

    steps: Sequence[ScriptStep]
    times_s: Sequence[float]
    overlapped_syncs: Mapping[int, OverlappedSync]
    clock_s: float = 0.0
    link_free_s: float = 0.0
    lane_free_s: float = 0.0
    waited_s: float = 0.0
    n_posted: int = 0
    waits_for: int | None = None
    queue: deque[int] = field(default_factory=deque)
    under_way: deque[int] = field(default_factory=deque)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    sync_slots: list[SyncSlot] = field(default_factory=list)


class Engine:
    """Runs the devices, and keeps the times of every message.

    first_at, both_at     posted at one end, posted at both ends
    left_at, arrived_at   start and end of the transfer
    """

    def __init__(
        self, script: Script, devices: Sequence[SimulatedDevice], routes: Sequence[Route]
    ) -> None:
        n_messages = script.n_messages
        self.devices, self.routes = devices, routes
        self.first_at: list[float | None] = [None] * n_messages
        self.both_at = [_NEVER] * n_messages
        self.left_at = [_NEVER] * n_messages
        self.arrived_at = [_NEVER] * n_messages
        self.ready: list[SimulatedDevice] = []

    def run(self) -> None:
        """Run all steps of all devices."""
        self.ready = list(self.devices)
        while self.ready:
            self._go_on(self.ready.pop())
        stuck = [i for i, device in enumerate(self.devices) if device.waits_for is not None]
        assert not stuck, f"devices {stuck} wait for ever: the schedule is not valid"

    def _go_on(self, device: SimulatedDevice) -> None:
        most_under_way = len(self.devices)
        for at in range(len(device.starts), len(device.steps)):
            posts, reads, _ = device.steps[at]
            if device.n_posted == at:
                device.n_posted = at + 1
                self._post(device, posts)
            if len(device.under_way) > most_under_way:
                reads = (device.under_way[0], *reads)
            if reads and not self._wait(device, reads):
                return
            if len(device.under_way) > most_under_way:
                device.under_way.popleft()
            start_s = device.clock_s
            end_s = start_s + device.times_s[at]
            if at in device.overlapped_syncs:
                end_s += self._place_sync(device, device.overlapped_syncs[at], start_s, end_s)
            device.starts.append(start_s)
            device.ends.append(end_s)
            device.clock_s = end_s

    def _post(self, device: SimulatedDevice, posts: Sequence[int]) -> None:
        """Post a batch of messages; its last send stands for the batch in `under_way`."""
        n_queued = len(device.queue)
        device.queue.extend(end for end in posts if end >= 0)
        if len(device.queue) > n_queued:
            device.under_way.append(device.queue[-1])
        for end in posts:
            message = end if end >= 0 else ~end
            first_s = self.first_at[message]
            if first_s is None:
                self.first_at[message] = device.clock_s
            else:
                self.both_at[message] = max(first_s, device.clock_s)
                self._move(self.devices[self.routes[message].sender])

    def _move(self, sender: SimulatedDevice) -> None:
        """Send every message that `sender` can send, in the order of posting."""
        queue = sender.queue
        while queue and (both_s := self.both_at[queue[0]]) < _NEVER:
            message = queue.popleft()
            time_s, _, receiver = self.routes[message]
            self.left_at[message] = start_s = max(sender.link_free_s, both_s)
            self.arrived_at[message] = sender.link_free_s = start_s + time_s
            for device in (sender, self.devices[receiver]):
                if device.waits_for == message:
                    device.waits_for = None
                    self.ready.append(device)

    def _wait(self, device: SimulatedDevice, messages: Sequence[int]) -> bool:
        """Advance the clock to the arrival of all `messages`; False if one has not left yet."""
        for message in messages:
            if self.arrived_at[message] == _NEVER:
                device.waits_for = message
                return False
        if len(messages) > 1:
            messages = sorted(messages, key=self.left_at.__getitem__)
        for message in messages:
            end_s = self.arrived_at[message]
            if end_s > device.clock_s:
                device.waited_s += end_s - max(self.left_at[message], device.clock_s)
                device.clock_s = end_s
        return True

    def _place_sync(
        self, device: SimulatedDevice, sync: OverlappedSync, start_s: float, end_s: float
    ) -> float:
        """Place gradient sync beside the step from `start_s` to `end_s`.

        Returns the seconds by which it slows the step. `times.py` has the law.
        """
        sync_s, n_buckets, overlapped_s, slowdown = sync
        first_s = min(start_s + (end_s - start_s) / n_buckets + overlapped_s, end_s)
        first_s = max(first_s, device.lane_free_s)
        hidden_s = min(max(end_s - first_s, 0.0), sync_s * (n_buckets - 1) / n_buckets)
        slowed_s = hidden_s * slowdown / (1 + slowdown)
        device.lane_free_s = max(first_s + sync_s, end_s + slowed_s + sync_s / n_buckets)
        device.sync_slots.append(SyncSlot(first_s, device.lane_free_s, slowed_s))
        return slowed_s
