"""A schedule as steps: each compute, with the messages to post before it and to wait for.

`place` decides where messages go; `lowering.py` says why. `lower` writes the same out as
actions. The simulator needs only the steps.

A *channel* carries a transfer one way: activations or gradients. With m microbatches, the
message of microbatch k on channel c has the number c m + k.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedule.actions import Action, Kind, Schedule, Transfer, chain
from autopar.schedule.grid import start_times


class ScriptStep(NamedTuple):
    """One compute, and the messages around it.

    posts     message ends to post before it: i is the send of message i, ~i its receive
    reads     messages that the compute waits for
    compute   None for a last step of messages only
    """

    posts: Sequence[int]
    reads: Sequence[int]
    compute: Action | None


@dataclass(frozen=True)
class Script:
    """The steps of every device.

    devices     the device of each stage
    channels    per channel, the send of microbatch 0
    """

    rows: tuple[tuple[ScriptStep, ...], ...]
    devices: tuple[int, ...]
    channels: tuple[Action, ...]
    n_microbatches: int

    @property
    def n_messages(self) -> int:
        return len(self.channels) * self.n_microbatches

    def send(self, message: int) -> Action:
        channel, microbatch = divmod(message, self.n_microbatches)
        return self.channels[channel]._replace(microbatch=microbatch)

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The same schedule as actions, device by device."""
        ends = [(send, send.partner) for send in self.channels]

        def written(row: Sequence[ScriptStep]) -> Iterator[Action]:
            return itertools.chain.from_iterable(self._actions(step, ends) for step in row)

        return tuple(tuple(written(row)) for row in self.rows)

    def _actions(self, step: ScriptStep, ends: Sequence[tuple[Action, Action]]) -> Iterator[Action]:
        for end in step.posts:
            channel, microbatch = divmod(end if end >= 0 else ~end, self.n_microbatches)
            kind, stage, _, peer = ends[channel][end < 0]
            yield Action(kind, stage, microbatch, peer)
        if step.compute is not None:
            yield step.compute


def script_of(schedule: Schedule, sends_as_made: bool = False) -> Script:
    """The steps of a valid schedule. If it is not lowered, it gets the messages of a chain.

    sends_as_made    place the messages by `place_as_made`, not by `place`

    Raises `VerificationError` if the schedule cannot finish.
    """
    if schedule.transfers is not None:
        return _read(schedule, schedule.transfers)
    put = place_as_made if sends_as_made else place
    return put(schedule, chain(schedule.n_stages))


def place(schedule: Schedule, transfers: Iterable[Transfer]) -> Script:
    """Put the messages of `transfers` into a valid schedule that has none.

    Stages on one device get no messages. Raises `VerificationError` if the schedule cannot finish.
    """
    by_clock: defaultdict[float, list[Action]] = defaultdict(list)
    times = start_times(schedule, lambda action: 1)
    for line, actions in zip(times, schedule.rows, strict=True):
        for start, action in zip(line, actions, strict=True):
            by_clock[start].append(action)
    sends, made, read = _channels(schedule, transfers)
    rows: list[list[ScriptStep]] = [[] for _ in schedule.rows]
    posts: list[list[int]] = [[] for _ in schedule.rows]
    # Messages go right after they are made, or right before they are read: see `lowering.py`.
    when_made = schedule.n_chunks > 1 or schedule.splits_backward

    def post(channels: _Channels, compute: Action) -> None:
        for first, source, target in channels.get((compute.kind, compute.stage), ()):
            posts[source].append(first + compute.microbatch)
            posts[target].append(~(first + compute.microbatch))

    for clock in sorted(by_clock):
        computes = by_clock[clock]
        for compute in computes if not when_made else ():
            post(read, compute)
        for compute in reversed(computes):
            device = schedule.device_of(compute.stage)
            rows[device].append(ScriptStep(posts[device], _numbers(read, compute), compute))
            posts[device] = []
            if when_made:
                post(made, compute)
    for row, left in zip(rows, posts, strict=True):
        if left:
            row.append(ScriptStep(left, (), None))
    return Script(tuple(map(tuple, rows)), schedule.devices, sends, schedule.n_microbatches)


def place_as_made(schedule: Schedule, transfers: Iterable[Transfer]) -> Script:
    """Send every message right after the compute that makes it; post all receives at the start.

    This models software whose sends never block and whose receives are posted ahead: only the
    links delay a message. `place` instead gives one order of messages that cannot deadlock.
    """
    sends, made, read = _channels(schedule, transfers)
    posts: list[Sequence[int]] = [
        [
            ~(channel.first + microbatch)
            for channels in made.values()
            for channel in channels
            if channel.target == device
            for microbatch in range(schedule.n_microbatches)
        ]
        for device in range(schedule.n_devices)
    ]
    rows = []
    for row, ready in zip(schedule.rows, posts, strict=True):
        steps = []
        for compute in row:
            steps.append(ScriptStep(ready, _numbers(read, compute), compute))
            ready = _numbers(made, compute)
        if ready:
            steps.append(ScriptStep(ready, (), None))
        rows.append(tuple(steps))
    return Script(tuple(rows), schedule.devices, sends, schedule.n_microbatches)


def _read(schedule: Schedule, transfers: Iterable[Transfer]) -> Script:
    """The steps of a lowered schedule."""
    sends, _, read = _channels(schedule, transfers)
    first = {
        (end.kind, end.stage, end.peer): i * schedule.n_microbatches
        for i, send in enumerate(sends)
        for end in (send, send.partner)
    }
    rows = []
    for row in schedule.rows:
        steps: list[ScriptStep] = []
        posts: list[int] = []
        for action in row:
            kind, stage, microbatch, peer = action
            if peer is None:
                steps.append(ScriptStep(posts, _numbers(read, action), action))
                posts = []
                continue
            message = first[kind, stage, peer] + microbatch
            posts.append(message if action.is_send else ~message)
        if posts:
            steps.append(ScriptStep(posts, (), None))
        rows.append(tuple(steps))
    return Script(tuple(rows), schedule.devices, sends, schedule.n_microbatches)


class _Channel(NamedTuple):
    """The number of the message of microbatch 0, and the devices at both ends."""

    first: int
    source: int
    target: int


# (kind, stage) of a compute -> the channels whose messages it makes, or reads.
_Channels = Mapping[tuple[Kind, int], Sequence[_Channel]]


def _channels(
    schedule: Schedule, transfers: Iterable[Transfer]
) -> tuple[tuple[Action, ...], _Channels, _Channels]:
    """The sends of microbatch 0 per channel; the channels by maker, and by reader."""
    made: defaultdict[tuple[Kind, int], list[_Channel]] = defaultdict(list)
    read: defaultdict[tuple[Kind, int], list[_Channel]] = defaultdict(list)
    sends: list[Action] = []
    returns: Kind = "backward_input" if schedule.splits_backward else "backward"
    for t in sorted(transfers):
        if schedule.is_inside(t):
            continue
        ways: list[tuple[Kind, Action]] = [("forward", t.forward(0)[0])]
        if t.has_gradient and schedule.trains:
            ways.append((returns, t.backward(0)[0]))
        for kind, send in ways:
            source, target = send.stage, send.partner.stage
            channel = _Channel(
                len(sends) * schedule.n_microbatches,
                schedule.device_of(source),
                schedule.device_of(target),
            )
            made[kind, source].append(channel)
            read[kind, target].append(channel)
            sends.append(send)
    return tuple(sends), made, read


def _numbers(channels: _Channels, compute: Action) -> Sequence[int]:
    """The numbers of the messages that a compute makes or reads."""
    kind, stage, microbatch, _ = compute
    return [channel.first + microbatch for channel in channels.get((kind, stage), ())]
