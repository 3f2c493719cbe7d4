"""How many microbatches a device holds while it runs its row.

A microbatch is live on a stage from the stage's forward to the end of its backward. If backward is
split, it waits for its weights between the two parts, and may keep less then.

    bytes of a device = sum over its stages of kept x (live - waiting) + kept for weights x waiting
"""

from __future__ import annotations

import itertools
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
    kinds = (action.kind for action in schedule.rows[device] if action.is_compute)
    changes = ((kind == "forward") - (kind in GRADIENTS_DONE) for kind in kinds)
    return max(itertools.accumulate(changes), default=0)


def in_flight_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of microbatches that are live on every stage."""
    live, most = [0] * schedule.n_stages, [0] * schedule.n_stages
    for kind, stage, _, peer in schedule:
        if peer is None:
            live[stage] += (kind == "forward") - (kind in GRADIENTS_DONE)
            most[stage] = max(most[stage], live[stage])
    return tuple(most)


def even_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """The microbatches that are live on every stage while its device has most, as even as may be.

    Stages of a device have their own most at different moments. Where all keep as much of a
    microbatch, only the sum counts. So the most of the device (`in_flight`) are divided evenly, but
    no stage has more than it ever has (`in_flight_by_stage`).
    """
    most, found = in_flight_by_stage(schedule), [0.0] * schedule.n_stages
    for device in range(schedule.n_devices):
        n_left = float(in_flight(schedule, device))
        stages = sorted(schedule.stages_on(device), key=lambda stage: most[stage])
        for k, stage in enumerate(stages):
            found[stage] = min(float(most[stage]), n_left / (len(stages) - k))
            n_left -= found[stage]
    return tuple(found)


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
