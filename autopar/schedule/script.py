"""A schedule as it is played: around each compute, what its device posts and what it reads.

`place` says where messages go (`autopar/schedule/lowering.py` says why there); `lower` writes
them out as actions. What plays a schedule many times, or a long one, needs no more than this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.schedule.actions import Action, Kind, Schedule, Transfer, chain
from autopar.schedule.clocks import start_times


class Step(NamedTuple):
    """One compute, and the messages around it.

    posts     ends of messages that are posted before it: i is the send of message i, ~i its receive
    reads     messages that it waits for
    compute   None where messages are all that is left
    """

    posts: tuple[int, ...]
    reads: Sequence[int]
    compute: Action | None


@dataclass(frozen=True)
class Script:
    """The steps of every device; message i is sent by `sends[i]`."""

    rows: tuple[tuple[Step, ...], ...]
    sends: tuple[Action, ...]

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The same written out, device by device."""
        return tuple(tuple(a for step in row for a in self._actions(step)) for row in self.rows)

    def _actions(self, step: Step) -> Iterable[Action]:
        for end in step.posts:
            yield self.sends[end] if end >= 0 else self.sends[~end].partner
        if step.compute is not None:
            yield step.compute


def script_of(schedule: Schedule, sends_as_made: bool = False) -> Script:
    """The steps of a valid schedule. One without messages is given those of a chain of stages.

    sends_as_made: by `place_as_made`, not by `place`.

    Raises `VerificationError` if the schedule cannot be finished.
    """
    if not schedule.is_lowered:
        put = place_as_made if sends_as_made else place
        return put(schedule, chain(schedule.n_stages))
    sends = tuple(action for action in schedule if action.is_send)
    number = {send: i for i, send in enumerate(sends)}
    return Script(tuple(tuple(_steps(row, number)) for row in schedule.rows), sends)


def place(schedule: Schedule, transfers: Iterable[Transfer]) -> Script:
    """Put the messages of `transfers` into a valid schedule that has none; none in a device.

    Raises `VerificationError` if the schedule cannot be finished.
    """
    by_clock: defaultdict[float, list[Action]] = defaultdict(list)
    times = start_times(schedule, lambda action: 1)
    for line, actions in zip(times, schedule.rows, strict=True):
        for start, action in zip(line, actions, strict=True):
            by_clock[start].append(action)
    sent_to = _sent_to(schedule, transfers)
    n_devices = schedule.n_devices
    rows: list[list[Step]] = [[] for _ in schedule.rows]
    posts: list[list[int]] = [[] for _ in schedule.rows]
    sends: list[Action] = []
    for clock in sorted(by_clock):
        computes = by_clock[clock]
        reads: list[range] = []
        for kind, stage, microbatch, _ in computes:
            first = len(sends)
            for send_kind, source, target in sent_to.get((kind, stage), ()):
                posts[source % n_devices].append(len(sends))
                posts[target % n_devices].append(~len(sends))
                sends.append(Action(send_kind, source, microbatch, target))
            reads.append(range(first, len(sends)))
        for compute, own in zip(computes, reads, strict=True):
            device = compute.stage % n_devices
            rows[device].append(Step(tuple(posts[device]), own, compute))
            posts[device].clear()
    for row, left in zip(rows, posts, strict=True):
        if left:
            row.append(Step(tuple(left), (), None))
    return Script(tuple(map(tuple, rows)), tuple(sends))


def place_as_made(schedule: Schedule, transfers: Iterable[Transfer]) -> Script:
    """Send every message right after the compute that makes it, and expect all from the start.

    What software does that never waits to send, and posts receives ahead: nothing but links delays
    a message. `place` is for one order of messages per pair that cannot deadlock.
    """
    sent_to = _sent_to(schedule, transfers)
    n_devices = schedule.n_devices
    reads: list[list[tuple[int, ...]]] = [[] for _ in schedule.rows]
    made: defaultdict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    posts: list[list[int]] = [[] for _ in schedule.rows]
    sends: list[Action] = []
    for row, own in zip(schedule.rows, reads, strict=True):
        for kind, stage, microbatch, _ in row:
            first = len(sends)
            for send_kind, source, target in sent_to.get((kind, stage), ()):
                made[kind, source, microbatch].append(len(sends))
                posts[target % n_devices].append(~len(sends))
                sends.append(Action(send_kind, source, microbatch, target))
            own.append(tuple(range(first, len(sends))))
    rows = []
    for row, own, expected in zip(schedule.rows, reads, posts, strict=True):
        steps, ready = [], tuple(expected)
        for compute, needed in zip(row, own, strict=True):
            steps.append(Step(ready, needed, compute))
            ready = tuple(made.get((compute.kind, compute.stage, compute.microbatch), ()))
        if ready:
            steps.append(Step(ready, (), None))
        rows.append(tuple(steps))
    return Script(tuple(rows), tuple(sends))


def _steps(row: Iterable[Action], number: Mapping[Action, int]) -> Iterator[Step]:
    posts: list[int] = []
    read: defaultdict[tuple[bool, int, int], list[int]] = defaultdict(list)
    for action in row:
        if action.is_compute:
            is_read = action.kind != "backward_weight"
            key = action.is_forward, action.stage, action.microbatch
            yield Step(tuple(posts), tuple(read.pop(key, ())) if is_read else (), action)
            posts.clear()
        elif action.is_send:
            posts.append(number[action])
        else:
            i = number[action.partner]
            posts.append(~i)
            read[action.is_forward, action.stage, action.microbatch].append(i)
    if posts:
        yield Step(tuple(posts), (), None)


def _sent_to(
    schedule: Schedule, transfers: Iterable[Transfer]
) -> Mapping[tuple[Kind, int], list[tuple[Kind, int, int]]]:
    """Compute of a stage -> the messages that it reads: kind of the send, source, target."""
    found: defaultdict[tuple[Kind, int], list[tuple[Kind, int, int]]] = defaultdict(list)
    for t in sorted(transfers):
        if schedule.is_inside(t):
            continue
        found["forward", t.target].append(("send_forward", t.source, t.target))
        if t.has_gradient:
            back: Kind = "backward_input" if schedule.splits_backward else "backward"
            found[back, t.source].append(("send_backward", t.target, t.source))
    return found
