"""Which collectives of a stage run beside compute, and which of them compute waits for.

    what                                     begins                            waited for
    ZeRO-3 gathers and reductions            where `program/order.py` says     where it says
    gradients returned per microbatch        with a bucket's last gradient     after backward
    gradients returned once a step           the same, in the last backward    at the end of a step
    all others                               in their place                    in their place

The first block's gathers, the last reductions (`calls_beside`) and the last bucket of each kind,
which ends with the first parameters, are waited for. The rest is overlapped: it runs beside the
compute of its part, and is exposed where it takes longer (`cost/simulate/times.py`):

    waited      first gathers + last reductions + last buckets + all others
    overlapped  the other gathers, reductions and buckets

With sync of s seconds whose last buckets take l, n = s / l buckets are priced. Blocks need not take
equally long; a small one (an embedding) hides less than this law says.

A bucket's later rounds (a parameter that several collectives bring back) start when all buckets are
there, so they are waited for as well. So are reductions of activations. Those that run beside the
weight gradient of one matmul (`passes/backward/overlap.py`) take less than is priced here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from autopar.cost.hardware import ProfiledDevice
from autopar.cost.laws import CostModel
from autopar.program import RankCall, StageProgram, return_buckets, step_calls

Calls = tuple[RankCall, ...]


class Apart(NamedTuple):
    """Collectives of a part of a step: those that compute waits for, and those beside it."""

    waited: Calls = ()
    overlapped: Calls = ()


class Overlap(NamedTuple):
    """A stage's collectives, apart; `forward` and `backward` of one microbatch, `step` once.

    before      before forward: all are waited for
    step        the return of gradients once a step: `waited` starts after the last backward
    last        the buckets of `step.overlapped` that end with the first parameters
    """

    before: Calls
    forward: Apart
    backward: Apart
    step: Apart
    last: Calls


def overlap_of(program: StageProgram) -> Overlap:
    """Which collectives of a stage run beside compute."""
    calls = step_calls(program)
    n_micro, micro_waits, micro_last = _returned(program, "micro", calls.backward)
    _, step_waits, step_last = _returned(program, "step", calls.after)
    inside = calls.backward[: len(calls.backward) - n_micro]
    within = _split(inside)
    sync = _apart(calls.backward[len(inside) :], [*micro_waits, *micro_last])
    return Overlap(
        calls.before,
        _split(calls.forward),
        Apart(within.waited + sync.waited, within.overlapped + sync.overlapped),
        _apart(calls.after, step_waits),
        tuple(step_last),
    )


def slowdown_of(cost: CostModel) -> float:
    """The extra time of compute beside collectives, as a fraction, if the profile has it."""
    device = cost.mesh.device
    return device.overlap_slowdown_fraction if isinstance(device, ProfiledDevice) else 0.0


def calls_time_s(calls: Iterable[RankCall], cost: CostModel) -> float:
    """Seconds of collectives that run one after the other."""
    return math.fsum(cost.primitive_time_s(c.kind, c.size_bytes, c.axes) for c in calls)


def _returned(
    program: StageProgram, period: str, calls: Calls
) -> tuple[int, list[RankCall], list[RankCall]]:
    """(how many of `calls`, the last ones, return gradients once per `period`; those of later
    rounds; the last bucket of each kind)."""
    _, fused = return_buckets(program, period)
    found = list(zip(fused, calls[len(calls) - len(fused) :], strict=True))
    last = {bucket.key: call for bucket, call in found if bucket.round == 0}
    return len(fused), [c for b, c in found if b.round], list(last.values())


def _split(calls: Calls) -> Apart:
    """The calls that compute waits for, and those that it runs beside."""
    return Apart(
        tuple(call for call in calls if not call.is_beside),
        tuple(call for call in calls if call.is_beside),
    )


def _apart(calls: Calls, waited: Iterable[RankCall]) -> Apart:
    """`calls` without those `waited` for, and those; equal calls are told apart by their count."""
    left = Counter(waited)
    kept: tuple[list[RankCall], list[RankCall]] = ([], [])
    for call in calls:
        is_waited = left[call] > 0
        left[call] -= is_waited
        kept[not is_waited].append(call)
    return Apart(tuple(kept[0]), tuple(kept[1]))
