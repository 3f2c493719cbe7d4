"""What a step of a pipeline program costs: seconds, bytes, MFU.

Read `overlap.py` (which collectives run beside compute), `stage_times.py` (seconds of each part of
a step on one stage), `prediction.py` (the schedule simulated with those times, and the peak memory
of every stage), then `hidden.py` (how much of each kind of communication is hidden) and
`exposed.py` (which collectives are not).

The room may import `laws`, `memory`, `simulate` and `hardware`, and what lies below `cost`; not
`transformer`, its neighbour. It hands on `predict` and `timeline_of`.
"""

from autopar.cost.price.exposed import ExposedCalls, exposed_calls
from autopar.cost.price.hidden import HiddenKind, hidden_of
from autopar.cost.price.overlap import HiddenShares, hidden_shares, slowdown_of
from autopar.cost.price.prediction import collectives_of, link_between, predict, timeline_of

__all__ = [
    "ExposedCalls",
    "HiddenKind",
    "HiddenShares",
    "collectives_of",
    "exposed_calls",
    "hidden_of",
    "hidden_shares",
    "link_between",
    "predict",
    "slowdown_of",
    "timeline_of",
]
