"""How many microbatches a device holds while it runs its row.

A microbatch is live on a stage from the stage's forward to the end of its backward. If backward is
split, it waits for its weights between the two parts, and may keep less then.

    bytes of a device = sum over its stages of kept x (live - waiting) + kept for weights x waiting
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autopar.schedule.actions import GRADIENTS_DONE, Schedule


class LiveCount(NamedTuple):
    """Numbers of microbatches at one moment, for each stage of a device in order.

    live       between forward and the end of backward
    waiting    those of them whose backward lacks only its parameter part
    """

    live: tuple[int, ...]
    waiting: tuple[int, ...]


def in_flight(schedule: Schedule, device: int) -> int:
    """The largest number of microbatches that are live on `device`, counted once a stage."""
    return max((sum(count.live) for count in _course(schedule, device)), default=0)


def in_flight_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of microbatches that are live on every stage."""
    live, most = [0] * schedule.n_stages, [0] * schedule.n_stages
    for kind, stage, _, peer in schedule:
        if peer is None:
            live[stage] += (kind == "forward") - (kind in GRADIENTS_DONE)
            most[stage] = max(most[stage], live[stage])
    return tuple(most)


def live_counts(schedule: Schedule, device: int) -> tuple[LiveCount, ...]:
    """What a device holds after each of its computes, in order of first occurrence.

    Left out are counts that another one exceeds on no stage less, whatever each microbatch keeps
    before and after the input part of its backward.
    """
    found = dict.fromkeys(_course(schedule, device))
    parts = {c: (*(a - b for a, b in zip(*c, strict=True)), *c.waiting) for c in found}
    return tuple(
        count
        for count in found
        if not any(
            other != count and all(a <= b for a, b in zip(parts[count], parts[other], strict=True))
            for other in found
        )
    )


def _course(schedule: Schedule, device: int) -> Iterator[LiveCount]:
    """What a device holds after each of its computes."""
    at = {stage: i for i, stage in enumerate(schedule.stages_on(device))}
    live, waiting = [0] * len(at), [0] * len(at)
    for kind, stage, _, peer in schedule.rows[device]:
        if peer is not None:
            continue
        live[at[stage]] += (kind == "forward") - (kind in GRADIENTS_DONE)
        waiting[at[stage]] += (kind == "backward_input") - (kind == "backward_weight")
        yield LiveCount(tuple(live), tuple(waiting))
