"""Captures an ordinary PyTorch model and a batch as one frozen, normalised `Program`.

Read: `pipeline.py` (all steps in order); `accumulate.py`; `trace/` (the module as one graph);
`names.py`, `findings.py` (the audit); `python_state/` (Python values in the graph, and hooks);
`buffers.py`, `inplace.py`, `view_writes.py`, `overlaps.py` (functional);
`builder.py`, `autocast.py` (its casts), `normalise.py` with `rewrites/`, `sorted_rows.py` (by
expert), `attention/` (masks), `mixtures.py` (of experts), `outputs.py` (canonical operators);
`dependence.py`, `constants.py`, `prologue.py` (cut); `lift.py` (all in float64);
`reference.py` (run the result); `positional.py` (run the module itself, on the result's random
numbers).
May import `cost`, `runtime` and the layers below them.
Mainly hands on `capture` (model -> `Program`), `Watch` (has what it froze changed?),
`reference_step` (the program on one process), and what runs the module itself in the same way.
"""

from autopar.capture.accumulate import accumulation_of, first_rows, microbatch
from autopar.capture.constants import buffer
from autopar.capture.outputs import loss_of
from autopar.capture.pipeline import capture
from autopar.capture.positional import PositionalRandom, draws_of
from autopar.capture.python_state import Watch, shown, version_of, with_history
from autopar.capture.reference import (
    as_graph_module,
    change_buffers,
    microbatch_inputs,
    reference_step,
    whole_buffers,
)
from autopar.capture.trace import LossFn, WithLoss, accepted, cast_at_door, check_kind

__all__ = [
    "LossFn",
    "PositionalRandom",
    "Watch",
    "WithLoss",
    "accepted",
    "accumulation_of",
    "as_graph_module",
    "buffer",
    "capture",
    "cast_at_door",
    "change_buffers",
    "check_kind",
    "draws_of",
    "first_rows",
    "loss_of",
    "microbatch",
    "microbatch_inputs",
    "reference_step",
    "shown",
    "version_of",
    "whole_buffers",
    "with_history",
]
