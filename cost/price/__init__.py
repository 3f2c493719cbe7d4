"""What a step of a pipeline program costs: seconds, bytes, MFU.

Read `overlap.py` (which collectives run beside compute), `documents.py` (microbatches that differ)
and `stage_times.py` (seconds of each part of a step on one stage). Then `prediction.py` (the
schedule simulated with those times, and the peak memory of every stage) and `step_pricer.py` (both,
for any pipeline on one machine).

Then what reports show of it: `divided.py` (how much of each collective is hidden), by kind of
communication in `hidden.py` and by collective in `exposed.py`; `shares.py` (what a step is made
of), `layers.py` (where a microbatch spends its time), `summary.py` (a plan in few words).

The room may import `laws`, `memory`, `simulate` and `hardware`, and what lies below `cost`; not
`transformer`, its neighbour. It mainly hands on `predict` and `timeline_of`.
"""

from autopar.cost.price.documents import share_of_pairs
from autopar.cost.price.exposed import ExposedCalls, exposed_calls
from autopar.cost.price.hidden import HiddenKind, hidden_of
from autopar.cost.price.layers import LayerWork, layer_works
from autopar.cost.price.overlap import overlap_of, slowdown_of
from autopar.cost.price.prediction import (
    collectives_of,
    link_between,
    memory_course_of,
    peak_memory_of,
    peak_of_stage,
    predict,
    row_peak_of,
    timeline_of,
)
from autopar.cost.price.shares import Share, StepShares, step_shares
from autopar.cost.price.stage_times import (
    backward_lines,
    forward_lines,
    stage_times,
    works_begin_s,
)
from autopar.cost.price.step_pricer import StepPricer
from autopar.cost.price.summary import summary_of

__all__ = [
    "ExposedCalls",
    "HiddenKind",
    "LayerWork",
    "Share",
    "StepPricer",
    "StepShares",
    "backward_lines",
    "collectives_of",
    "exposed_calls",
    "forward_lines",
    "hidden_of",
    "layer_works",
    "link_between",
    "memory_course_of",
    "overlap_of",
    "peak_memory_of",
    "peak_of_stage",
    "predict",
    "row_peak_of",
    "share_of_pairs",
    "slowdown_of",
    "stage_times",
    "step_shares",
    "summary_of",
    "timeline_of",
    "works_begin_s",
]
