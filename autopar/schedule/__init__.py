"""Decides which device does what in a pipeline schedule, in which order. Schedules are data.

Read: `actions.py` (an action, a transfer, a schedule, and their text), `grid.py` (when every
action runs; why one simulation proves that a schedule finishes), `legality.py` (what a schedule
must satisfy), `orders.py` (gpipe, 1f1b, interleaved, zero bubble, V shapes), `live.py` (how many
microbatches a device holds), `lowering.py` and `script.py` (where sends and receives go).
May import `errors`, `units`, `operators` and `precision`.
Mainly hands on `Schedule`, `lower`, `validate` and `script_of`: the simulator, the verifier and the
runtime read the same schedule.
"""

from autopar.schedule.actions import (
    GRADIENTS_DONE,
    Action,
    Kind,
    Schedule,
    Transfer,
    chain,
    parse_action,
    parse_schedule,
)
from autopar.schedule.grid import clocks, format_grid, start_times
from autopar.schedule.legality import prove_deadlock_free, validate
from autopar.schedule.live import (
    LiveCount,
    even_in_flight,
    in_flight,
    in_flight_by_stage,
    live_counts,
)
from autopar.schedule.lowering import lower
from autopar.schedule.orders import (
    CHUNKS,
    ORDERS,
    SPLITS_BACKWARD,
    ScheduleFactory,
    check_microbatches,
    devices_of,
    dualpipe_v,
    fewest_microbatches,
    first_forwards,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
    zero_bubble_v,
)
from autopar.schedule.script import Script, ScriptStep, place, script_of

__all__ = [
    "CHUNKS",
    "GRADIENTS_DONE",
    "ORDERS",
    "SPLITS_BACKWARD",
    "Action",
    "Kind",
    "LiveCount",
    "Schedule",
    "ScheduleFactory",
    "Script",
    "ScriptStep",
    "Transfer",
    "chain",
    "check_microbatches",
    "clocks",
    "devices_of",
    "dualpipe_v",
    "even_in_flight",
    "fewest_microbatches",
    "first_forwards",
    "format_grid",
    "forward_only",
    "gpipe",
    "in_flight",
    "in_flight_by_stage",
    "interleaved",
    "live_counts",
    "lower",
    "one_f_one_b",
    "parse_action",
    "parse_schedule",
    "place",
    "prove_deadlock_free",
    "script_of",
    "start_times",
    "validate",
    "zero_bubble",
    "zero_bubble_v",
]
