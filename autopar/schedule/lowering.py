"""Where sends and receives go, so that no schedule deadlocks.

A blocking send returns when its receive is posted. The obvious rule is to send a tensor as soon
as it is made and to receive it right before it is read. It deadlocks 1f1b: stage i sends forward
while stage i + 1 sends backward, and neither receives.

Instead, `lower` puts all messages and all compute in *one* global order of events, and each
stage gets the events that it takes part in. Proof that this cannot deadlock: take the first
event in that order that is not done. It is the next event of every stage in it, so it can run.
The proof holds for any transfers, skip connections included.

The order follows the clocks at equal costs (`script.place`). All messages of a clock come before
its compute. With one stage per device and whole backwards, a message goes right before the
action that reads it:
- a message never waits for compute that starts in the same clock as its reader;
- lowering adds no clock at equal costs;
- the exchange of 1f1b's steady state (activations one way, gradients the other) is one run of
  messages on both stages. It may be posted as one batch, which only posts some of them earlier.

With several stages per device, or a split backward, a device does other compute between making
a tensor and the clock in which it is read. So a message goes right after the compute that makes
its tensors. This is still one order and adds no clock. (At backward = 2 forward, four devices of
two chunks take as long as the textbook step. With messages right before the read they would take
a tenth longer.)

A tensor that skips stages waits on the stage that made it. With unequal costs, neighbours still
exchange at once, but one end of a skip connection may have to wait while the other computes. At
backward = 2 forward, four stages of 1f1b with a transfer from first to last take a quarter
longer if every send blocks, and a tenth longer if sends are posted without waiting.
`start_times` simulates this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.schedule.actions import Schedule, Transfer
from autopar.schedule.legality import check_transfers, validate
from autopar.schedule.script import place


def lower(schedule: Schedule, transfers: Iterable[Transfer]) -> Schedule:
    """`schedule` with the sends and receives of `transfers`; none between stages of one device.

    The result is valid by construction. It is proved again before it runs
    (`verifier/pipeline.py`).

    Raises `VerificationError` if the schedule or the transfers are not valid.
    """
    assert not schedule.is_lowered, "lowered already"
    transfers = frozenset(transfers)
    check_transfers(schedule.n_stages, transfers)
    validate(schedule)
    rows = place(schedule, transfers).actions()
    return replace(schedule, rows=rows, transfers=transfers)
