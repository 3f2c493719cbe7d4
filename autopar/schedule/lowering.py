"""Where sends and receives go, so that no stages wait for each other for ever.

A blocking send returns when its receive is posted. Sending as soon as a tensor is made and
receiving right before it is read deadlocks 1f1b: stage i sends forward while stage i + 1 sends
backward, and neither receives. `lower` puts all messages and all compute in *one* order of
events, and gives each stage the events that it takes part in. Of what is left at any time,
the first event in that order is the next one of every stage in it, so it can run: no
transfers graph, skip connections included, can deadlock.

The order is that of the clocks at equal costs (`script.place`); a message goes right before the
action that reads it, and all messages of a clock before its compute. So a message never waits for
compute that starts when its reader does, lowering adds no clock at equal costs, and the exchange
of 1f1b's steady state (activations one way, gradients the other) is one run of messages on both
stages. Such a run may be posted as one batch: that only posts some of them earlier.

With several stages per device, or a backward in two parts, devices compute between making a
tensor and the clock in which it is read. There a message goes right after the compute that makes
it: still one order, and no clock added. (At backward = 2 forward, four devices of two chunks would
take a tenth longer than the textbook's step if it went last, and take no longer as it goes first.)

A tensor that skips stages waits on the stage that made it. Where costs are not equal, neighbours
still exchange at once, but the ends of a skip connection may meet while one of them computes:
at backward = 2 forward, four stages of 1f1b with a transfer from first to last take a quarter
longer if every send blocks, and a tenth if sends are posted without waiting. `start_times`
prices it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.schedule.actions import Schedule, Transfer
from autopar.schedule.legality import check_transfers, validate
from autopar.schedule.script import place


def lower(schedule: Schedule, transfers: Iterable[Transfer]) -> Schedule:
    """`schedule` with the sends and receives of `transfers`; none inside a device. What comes out
    is valid by its construction; who runs it proves that (`pipeline_verifier.py`).

    Raises `VerificationError` if the schedule or the transfers are not valid.
    """
    assert not schedule.is_lowered, "lowered already"
    transfers = frozenset(transfers)
    check_transfers(schedule.n_stages, transfers)
    validate(schedule)
    rows = place(schedule, transfers).actions()
    return replace(schedule, rows=rows, transfers=transfers)
