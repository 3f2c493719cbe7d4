"""When the actions of a schedule run, given the duration of each.

A device runs its actions one by one, in order (`start_times`):

    forward of microbatch k on stage s    waits for k's forward on stage s - 1
    backward of k on stage s              waits for k's backward on stage s + 1; if backward is
                                          split, the input part waits for the input part
    a send                                starts and ends together with its receive (rendezvous)

In a lowered schedule, messages replace the first two waits. Before lowering, transfers do not
matter: each stage waits for its neighbour, and so by induction for all stages before it.

Deadlock: a device has exactly one next action, so running one action never disables another.
Whether all actions can finish therefore depends neither on durations nor on which device goes
first. One simulation that ends proves that every run ends. If it gets stuck, every unfinished
device waits for exactly one other device; following these waits finds a cycle (`_cycle`).

With equal costs on n stages and m microbatches, 1f1b and gpipe both take
(n + m - 1)(forward + backward) clocks. They differ in memory (`live.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from autopar.errors import VerificationError
from autopar.schedule.actions import IDLE, Action, Kind, Schedule

Times = tuple[tuple[float, ...], ...]

# Kind, stage and microbatch of a compute action.
_Compute = tuple[Kind, int, int]


def start_times(schedule: Schedule, duration: Callable[[Action], float]) -> Times:
    """When each action of each device starts.

    duration    of a compute, or of a message: it is called with the send, not the receive

    Raises `VerificationError` with the cycle of waits if the schedule cannot finish.
    """
    starts: list[list[float]] = [[] for _ in schedule.rows]
    free_at = [0.0] * schedule.n_devices
    ended_at: dict[_Compute, float] = {}
    progress = True
    while progress:
        progress = False
        for device, actions in enumerate(schedule.rows):
            mine = starts[device]
            while len(mine) < len(actions):
                action = actions[len(mine)]
                if action.is_compute:
                    needed = _needed(schedule, action)
                    if needed is None:
                        start = free_at[device]
                    elif needed in ended_at:
                        start = max(free_at[device], ended_at[needed])
                    else:
                        break
                    ended_at[action[:3]] = free_at[device] = start + duration(action)
                else:
                    partner = action.partner
                    if _blocking_device(schedule, action, partner, starts) is not None:
                        break
                    other = schedule.device_of(partner.stage)
                    start = max(free_at[device], free_at[other])
                    end = start + duration(action if action.is_send else partner)
                    free_at[device] = free_at[other] = end
                    starts[other].append(start)
                mine.append(start)
                progress = True
    if any(len(s) < len(a) for s, a in zip(starts, schedule.rows, strict=True)):
        raise _cycle(schedule, starts, ended_at)
    return tuple(map(tuple, starts))


def clocks(schedule: Schedule, forward: float = 1, backward: float = 1, weight: float = 1) -> float:
    """When the last action ends, if all stages are equal and messages take no time.

    If backward is split, `backward` is the cost of its first part and `weight` of its second.
    """
    cost = {
        "forward": forward,
        "backward": backward,
        "backward_input": backward,
        "backward_weight": weight,
    }
    times = start_times(schedule, lambda action: cost.get(action.kind, 0))
    ends = (
        start + cost.get(action.kind, 0)
        for line, actions in zip(times, schedule.rows, strict=True)
        for start, action in zip(line, actions, strict=True)
    )
    return max(ends, default=0)


def format_grid(schedule: Schedule) -> str:
    """One line per device, one column per clock, at equal costs; `.` is idle.

    Messages take no clock, so a lowered schedule has no grid. Print it with `str` instead.
    """
    assert not schedule.is_lowered, "a lowered schedule has no grid"
    times = start_times(schedule, lambda action: 1)
    width = max((len(str(action)) for action in schedule), default=1)
    n_clocks = int(clocks(schedule))
    lines = []
    for line, actions in zip(times, schedule.rows, strict=True):
        cells = {int(start): str(action) for start, action in zip(line, actions, strict=True)}
        words = (cells.get(i, IDLE).ljust(width) for i in range(n_clocks))
        lines.append(" ".join(words).rstrip())
    return "\n".join(lines) + "\n"


def _needed(schedule: Schedule, action: Action) -> _Compute | None:
    """The compute of a neighbouring stage that the compute `action` waits for."""
    kind, stage, microbatch, _ = action
    if schedule.transfers is not None or kind == "backward_weight":
        return None
    other = stage - 1 if kind == "forward" else stage + 1
    return (kind, other, microbatch) if 0 <= other < schedule.n_stages else None


def _blocking_device(
    schedule: Schedule, message: Action, partner: Action, starts: list[list[float]]
) -> int | None:
    """The device that is not yet at `partner`, the other end of `message`; None if it is there."""
    to, devices = partner.stage, schedule.devices
    if to >= len(devices) or (peer := devices[to]) == devices[message.stage]:
        raise VerificationError(
            f"{message} has stage {partner.stage} at its other end, which cannot be"
        )
    actions = schedule.rows[peer]
    at = len(starts[peer])
    return None if at < len(actions) and actions[at] == partner else peer


def _waits_for(
    schedule: Schedule, action: Action, starts: list[list[float]], ended_at: dict[_Compute, float]
) -> int | None:
    """The device that blocks `action`, the next one of its own device; None if it can start."""
    if not action.is_compute:
        return _blocking_device(schedule, action, action.partner, starts)
    needed = _needed(schedule, action)
    if needed is None or needed in ended_at:
        return None
    return schedule.device_of(needed[1])


def _cycle(
    schedule: Schedule, starts: list[list[float]], ended_at: dict[_Compute, float]
) -> VerificationError:
    """The error that shows a cycle of waiting devices, each with the action it is stuck in."""
    stuck = {
        device: actions[len(starts[device])]
        for device, actions in enumerate(schedule.rows)
        if len(starts[device]) < len(actions)
    }
    who = "stage" if schedule.n_chunks == 1 else "device"
    path = [min(stuck)]
    while True:
        action = stuck[path[-1]]
        following = _waits_for(schedule, action, starts, ended_at)
        assert following is not None, f"{action} can run"
        if following not in stuck:
            return VerificationError(
                f"{action} waits for ever: {who} {following} ends without what it waits for"
            )
        if following in path:
            break
        path.append(following)
    cycle = [*path[path.index(following) :], following]
    waits = "; ".join(
        f"{who} {a} in {stuck[a]} waits for {who} {b}" for a, b in itertools.pairwise(cycle)
    )
    return VerificationError(
        f"{who}s wait for each other for ever: {waits}",
        hint="put the two ends of every message, and what it waits for, in one common order",
    )
