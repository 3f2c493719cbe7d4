"""Where sends and receives go, so that no schedule deadlocks.

A blocking send returns when its receive is posted. The obvious rule is to send a tensor as soon
as it is made and to receive it right before it is read. It deadlocks 1f1b: stage i sends forward
while stage i + 1 sends backward, and neither receives.

Instead, `lower` puts all messages and all compute in *one* global order of events, and each
stage gets the events that it takes part in. Proof that this cannot deadlock: take the first
event in that order that is not done. It is the next event of every stage in it, so it can run.
The proof holds for any transfers, skip connections included.

The order follows the clocks at equal costs (`script.place`). With one stage per device and whole
backwards, a message goes right before the action that reads it, and all messages of a clock come
before its compute:
- a message never waits for compute that starts in the same clock as its reader;
- lowering adds no clock at equal costs;
- the exchange of 1f1b's steady state (activations one way, gradients the other) is one run of
  messages on both stages. It may be posted as one batch, which only posts some of them earlier.

With several stages per device, or a split backward, a device does other compute between making
a tensor and the clock in which it is read. So a message goes right after the compute that makes
its tensors, and the computes of a clock are in order from the last device to the first. So a
device posts a receive from a later device before the compute that runs while the tensor is made;
one from an earlier device, right after that compute. Only posts come early, and a device waits for
a message where it reads it; a device that waited for each message in turn would lose that time.

With messages of 5% of a forward, and sends that start as soon as made as the best case, a step of
interleaved takes so many messages more than one with free messages: p = 4, v = 4, m = 16: 30 (30 in
the best case); m = 32: 79 (30), a percent of the step. In the order of the clocks alone, where
every receive comes after the compute beside it, these are 59 and 187 (compare pytorch#188833).
ZB-V and DualPipeV are at their best case if 2p <= m. To post receives from earlier devices early
too, each edge would need an order of its own, and another proof.

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
