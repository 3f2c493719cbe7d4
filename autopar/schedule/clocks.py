"""When the actions of a schedule run, given how long each takes.

A stage runs its actions one by one, in order:

    forward of microbatch k on stage s    waits for k's forward on stage s - 1
    backward of k on stage s              waits for k's backward on stage s + 1
    a send                                starts with its receive (rendezvous), and ends with it

In a lowered schedule, messages take the place of the first two. Skip connections and missing
links change nothing in a schedule that has no messages yet: a stage waits for its neighbour,
and by induction for all stages before it.

A stage has one next action, so running one never disables another. Hence whether all actions
can be finished does not depend on durations or on who goes first: one simulation
(`start_times`) that ends is a proof that every run does. One that does not end leaves every
unfinished stage waiting for exactly one other, so following them finds a cycle (`_cycle`).

With equal costs on n stages and m microbatches, 1f1b and gpipe both take
(n + m - 1)(forward + backward) clocks; `in_flight` is what tells them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from autopar.errors import VerificationError
from autopar.schedule.actions import IDLE, Action, Schedule

Times = tuple[tuple[float, ...], ...]


def start_times(schedule: Schedule, duration: Callable[[Action], float]) -> Times:
    """When each action of each stage starts; `duration` of a message is asked of its send.

    Raises `VerificationError` with the cycle of waits if the schedule cannot be finished.
    """
    starts: list[list[float]] = [[] for _ in schedule.stages]
    free_at = [0.0] * schedule.n_stages
    ended_at: dict[Action, float] = {}
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule.stages):
            while len(starts[stage]) < len(actions):
                action = actions[len(starts[stage])]
                if _waits_for(schedule, action, starts, ended_at) is not None:
                    break
                together = [action] if action.is_compute else [action, action.partner]
                needs = [ended_at[a] for a in _needs(schedule, action)]
                start = max([free_at[a.stage] for a in together] + needs)
                timed = next((a for a in together if a.is_send), action)
                for done in together:
                    starts[done.stage].append(start)
                    ended_at[done] = free_at[done.stage] = start + duration(timed)
                progress = True
    if any(len(s) < len(a) for s, a in zip(starts, schedule.stages, strict=True)):
        raise _cycle(schedule, starts, ended_at)
    return tuple(map(tuple, starts))


def clocks(schedule: Schedule, forward: float = 1, backward: float = 1) -> float:
    """When the last action ends, if all stages take the same time and messages none."""
    cost = {"forward": forward, "backward": backward}
    times = start_times(schedule, lambda action: cost.get(action.kind, 0))
    ends = (
        start + cost.get(action.kind, 0)
        for line, actions in zip(times, schedule.stages, strict=True)
        for start, action in zip(line, actions, strict=True)
    )
    return max(ends, default=0)


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most microbatches whose forward `stage` has run, and whose backward it has not."""
    most = now = 0
    for action in schedule.stages[stage]:
        now += (action.kind == "forward") - (action.kind == "backward")
        most = max(most, now)
    return most


def format_grid(schedule: Schedule) -> str:
    """A line per stage and a column per clock, all actions of equal cost; `.` is idle.

    Messages take no clock, so a lowered schedule has no grid; print it as it is.
    """
    assert not schedule.is_lowered, "a lowered schedule has no grid"
    times = start_times(schedule, lambda action: 1)
    width = max((len(str(action)) for action in schedule), default=1)
    n_clocks = int(clocks(schedule))
    lines = []
    for line, actions in zip(times, schedule.stages, strict=True):
        cells = {int(start): str(action) for start, action in zip(line, actions, strict=True)}
        words = (cells.get(i, IDLE).ljust(width) for i in range(n_clocks))
        lines.append(" ".join(words).rstrip())
    return "\n".join(lines) + "\n"


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    """Compute of another stage that `action` waits for."""
    if schedule.is_lowered or not action.is_compute:
        return []
    other = action.stage + (-1 if action.kind == "forward" else 1)
    if not 0 <= other < schedule.n_stages:
        return []
    return [Action(action.kind, other, action.microbatch)]


def _waits_for(
    schedule: Schedule, action: Action, starts: list[list[float]], ended_at: dict[Action, float]
) -> int | None:
    """The stage that keeps `action`, the next of its own stage, from starting; None if none."""
    if action.is_compute:
        waits = (a.stage for a in _needs(schedule, action) if a not in ended_at)
        return next(waits, None)
    peer = action.partner.stage
    if peer == action.stage or not peer < schedule.n_stages:
        raise VerificationError(f"{action} has stage {peer} at its other end, which cannot be")
    actions = schedule.stages[peer]
    at = len(starts[peer])
    return None if at < len(actions) and actions[at] == action.partner else peer


def _cycle(
    schedule: Schedule, starts: list[list[float]], ended_at: dict[Action, float]
) -> VerificationError:
    """The stages that wait for each other, each with the action it is stuck in."""
    stuck = {
        stage: actions[len(starts[stage])]
        for stage, actions in enumerate(schedule.stages)
        if len(starts[stage]) < len(actions)
    }
    path = [min(stuck)]
    while True:
        action = stuck[path[-1]]
        following = _waits_for(schedule, action, starts, ended_at)
        assert following is not None, f"{action} can run"
        if following not in stuck:
            return VerificationError(
                f"{action} waits for ever: stage {following} ends without what it waits for"
            )
        if following in path:
            break
        path.append(following)
    cycle = [*path[path.index(following) :], following]
    waits = "; ".join(
        f"stage {a} in {stuck[a]} waits for stage {b}" for a, b in itertools.pairwise(cycle)
    )
    return VerificationError(
        f"stages wait for each other for ever: {waits}",
        hint="put the two ends of every message, and what it waits for, in one common order",
    )
