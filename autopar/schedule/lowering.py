"""Where sends and receives go, so that no stages wait for each other for ever.

A blocking send returns when its receive is posted. Sending as soon as a tensor is made and
receiving right before it is read deadlocks 1f1b: stage i sends forward while stage i + 1 sends
backward, and neither receives. `lower` puts all messages and all compute in *one* order of
events, and gives each stage the events that it takes part in. Of what is left at any time,
the first event in that order is the next one of every stage in it, so it can run: no
transfers graph, skip connections included, can deadlock.

The order is that of the clocks at equal costs; a message goes right before the action that
reads it, and all messages of a clock before its compute. So a message never waits for compute
that starts when its reader does, lowering adds no clock at equal costs, and the exchange
of 1f1b's steady state (activations one way, gradients the other) is one run of messages on both
stages. Such a run may be posted as one batch: that only posts some of them earlier.

A tensor that skips stages waits on the stage that made it. Where costs are not equal, neighbours
still exchange at once, but the ends of a skip connection may meet while one of them computes:
at backward = 2 forward, four stages of 1f1b with a transfer from first to last take a quarter
longer if every send blocks, and a tenth if sends are posted without waiting. `start_times`
prices it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from autopar.schedule.actions import Action, Schedule, Transfer
from autopar.schedule.clocks import start_times
from autopar.schedule.validate import check_transfers, validate


def lower(schedule: Schedule, transfers: Iterable[Transfer]) -> Schedule:
    """`schedule` with the sends and receives of `transfers`.

    Raises `VerificationError` if the schedule or the transfers are not valid.
    """
    assert not schedule.is_lowered, "lowered already"
    transfers = frozenset(transfers)
    check_transfers(schedule.n_stages, transfers)
    validate(schedule)
    by_clock: defaultdict[float, list[Action]] = defaultdict(list)
    times = start_times(schedule, lambda action: 1)
    for line, actions in zip(times, schedule.stages, strict=True):
        for start, action in zip(line, actions, strict=True):
            by_clock[start].append(action)
    touching = [
        [t for t in sorted(transfers) if stage in (t.source, t.target)]
        for stage in range(schedule.n_stages)
    ]
    stages: list[list[Action]] = [[] for _ in schedule.stages]
    for clock in sorted(by_clock):
        computes = by_clock[clock]
        messages = [a for c in computes for a in _messages_to(c, touching[c.stage])]
        for action in (*messages, *computes):
            stages[action.stage].append(action)
    lowered = replace(schedule, stages=tuple(map(tuple, stages)), transfers=transfers)
    validate(lowered)
    return lowered


def _messages_to(action: Action, transfers: Iterable[Transfer]) -> list[Action]:
    """Sends and receives of what `action` reads."""
    k = action.microbatch
    if action.kind == "forward":
        pairs = [t.forward(k) for t in transfers if t.target == action.stage]
    else:
        pairs = [t.backward(k) for t in transfers if t.has_gradient and t.source == action.stage]
    return [end for pair in pairs for end in pair]
