"""Which collectives of a stage run beside compute, and which of them compute waits for.

    what                                     begins                            waited for
    ZeRO-3 gathers and reductions            where `order.py` says             where it says
    gradients returned per microbatch        with a bucket's last gradient     after backward
    gradients returned once a step           the same, in the last backward    at the end of a step
    collectives inside an operator           with its compute                  with its compute
    collectives at a matmul, under software  with the matmul                   with it, all but a
    that runs them in chunks                                                   chunk
    all others                               in their place                    in their place

Those that run beside compute (`RankCall.is_beside`) are overlapped: they are exposed where all of
them together take longer than the compute of their part (`cost/simulate/times.py`). Compute waits
for the others: for the first block's gathers, the last reductions, the last bucket of each kind,
which ends with the first parameters, and sums of activations.

With sync of s seconds whose last buckets take l, n = s / l buckets are priced. Blocks need not take
equally long; a small one (an embedding) hides less than this law says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.cost.hardware import ProfiledDevice
from autopar.cost.laws import CostModel
from autopar.program.communication import RankCall, return_buckets, step_calls
from autopar.program.lines import StageProgram


class TimedCall(NamedTuple):
    """A call, and how long it takes."""

    call: RankCall
    time_s: float


Calls = tuple[TimedCall, ...]


class Overlap(NamedTuple):
    """A stage's collectives; `forward` and `backward` of one microbatch, `step` once.

    weights     of the second part of a backward that is split
    before      before forward: all are waited for
    step        the return of gradients once a step: what is waited for starts after the last
                backward
    last_s      seconds of the buckets of `step` that end with the first parameters
    """

    before: Calls
    forward: Calls
    backward: Calls
    step: Calls
    last_s: float
    weights: Calls = ()


def overlap_of(program: StageProgram, cost: CostModel) -> Overlap:
    """Which collectives of a stage run beside compute."""
    calls = step_calls(program)
    _, fused = return_buckets(program, "step")
    step = _timed(calls.after, cost)
    last = {b.key: call for b, call in zip(fused, step, strict=True) if not b.round}
    return Overlap(
        _timed(calls.before, cost),
        _timed(calls.forward, cost),
        _timed(calls.backward, cost),
        step,
        overlapped_of(last.values()),
        _timed(calls.weights, cost),
    )


def slowdown_of(cost: CostModel) -> float:
    """The extra time of compute beside collectives, as a fraction, if the profile has it."""
    device = cost.mesh.device
    return device.overlap_slowdown_fraction if isinstance(device, ProfiledDevice) else 0.0


def waited_of(calls: Iterable[TimedCall]) -> float:
    """Seconds of the calls that compute waits for."""
    return math.fsum(time_s for call, time_s in calls if not call.is_beside)


def overlapped_of(calls: Iterable[TimedCall]) -> float:
    """Seconds of the calls that run beside compute."""
    return math.fsum(time_s for call, time_s in calls if call.is_beside)


def _timed(calls: Sequence[RankCall], cost: CostModel) -> Calls:
    """Calls of repeated lines, and of the steps of a ring, are one object, and are split once."""
    split = {key: tuple(_split_call(call, cost)) for key, call in {id(c): c for c in calls}.items()}
    return tuple(timed for call in calls for timed in split[id(call)])


def _split_call(call: RankCall, cost: CostModel) -> Iterator[TimedCall]:
    """A call; one inside an operator, or at a matmul that hides it, in two: what is beside
    compute, and what is left."""
    time_s = call.imbalance * cost.primitive_time_s(call.kind, call.size_bytes, call.axes)
    beside_s = min(call.beside_s, time_s)
    if call.under_matmul and not call.is_beside:
        beside_s = cost.share_under_matmul(call.kind, call.axes) * time_s
    if beside_s:
        yield TimedCall(replace(call, is_beside=True), beside_s)
    if beside_s < time_s or not time_s:
        yield TimedCall(call, time_s - beside_s)
