"""Which collectives of a stage run beside compute, and which of them compute waits for.

    what                                     begins                            waited for
    ZeRO-3 gathers of a block                a block ahead, both ways          at the block
    ZeRO-3 reductions of a block             after its backward                a block later
    gathers of several moves                 in their place                    in their place
    reductions of several moves              after the block's backward        in their place; the
                                                                               last a block later
    gradients returned per microbatch        with a bucket's last gradient     after backward
    gradients returned once a step           the same, in the last backward    at the end of a step
    all others                               in their place                    in their place

A block is a module path up to its first number (`numbered_module`). No compute runs before the
first block's gathers, nor after the reductions of the last one: they are waited for. A tied
embedding is gathered for the lookup and again for the head, and waited for once. So is the last
bucket of each kind, which ends with the first parameters. No gather of backward is, where the block
that it begins with stays gathered (`kept_gathers`). The rest is overlapped: it runs beside the
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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autopar.cost.hardware import ProfiledDevice
from autopar.cost.laws import CostModel
from autopar.program import (
    RankCall,
    StageProgram,
    kept_gathers,
    numbered_module,
    return_buckets,
    step_calls,
)

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
    returned = calls.backward[len(inside) :]
    gathers = [] if kept_gathers(program) else [c for c in inside if c.phase == "param_gather"]
    ends = [
        *_first_block(gathers),
        *_first_block([c for c in inside[::-1] if c.phase == "grad_sync"]),
        *(c for c in inside if c.in_place or c.phase not in ("param_gather", "grad_sync")),
    ]
    first = _first_block([c for c in calls.forward if c.phase == "param_gather"])
    others = [c for c in calls.forward if c.in_place or c.phase != "param_gather"]
    within, sync = _apart(inside, ends), _apart(returned, [*micro_waits, *micro_last])
    return Overlap(
        calls.before,
        _apart(calls.forward, [*first, *others]),
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


def _block_of(call: RankCall) -> str:
    """The block of a call's first parameter; its own path if it has none."""
    parameter = call.tensor.split(", ")[0]
    return numbered_module(parameter) or parameter


def _first_block(calls: Sequence[RankCall]) -> list[RankCall]:
    """The first calls, of one block, each once: an abridged program repeats equal calls."""
    found: list[RankCall] = []
    for call in calls:
        if call in found or _block_of(call) != _block_of(calls[0]):
            break
        found.append(call)
    return found


def _returned(
    program: StageProgram, period: str, calls: Calls
) -> tuple[int, list[RankCall], list[RankCall]]:
    """(how many of `calls`, the last ones, return gradients once per `period`; those of later
    rounds; the last bucket of each kind)."""
    _, fused = return_buckets(program, period)
    found = list(zip(fused, calls[len(calls) - len(fused) :], strict=True))
    last = {bucket.key: call for bucket, call in found if bucket.round == 0}
    return len(fused), [c for b, c in found if b.round], list(last.values())


def _apart(calls: Calls, waited: Iterable[RankCall]) -> Apart:
    """`calls` without those `waited` for, and those; equal calls are told apart by their count."""
    left = Counter(waited)
    kept: tuple[list[RankCall], list[RankCall]] = ([], [])
    for call in calls:
        is_waited = left[call] > 0
        left[call] -= is_waited
        kept[not is_waited].append(call)
    return Apart(tuple(kept[0]), tuple(kept[1]))
