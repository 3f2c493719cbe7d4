"""Captures an ordinary PyTorch model and a batch as one frozen, normalised `Program`.

Read: `pipeline.py` (all steps in order); `accumulate.py`; `isolate.py`, `norms.py`, `export.py`,
`names.py`, `regions.py` (the trace); `findings.py` (the audit);
`buffers.py`, `inplace.py`, `view_writes.py` (functional);
`builder.py`, `normalise.py` with `rewrites/`, `outputs.py` (canonical operators);
`dependence.py`, `constants.py`, `prologue.py` (cut); `reference.py` (run the result).
May import `cost`, `runtime` and the layers below them.
Hands on `capture` (model -> `Program`) and `reference_step` (the program on one process).
"""

from autopar.capture.accumulate import accumulation_of, first_rows
from autopar.capture.export import accepted
from autopar.capture.pipeline import capture
from autopar.capture.reference import (
    as_graph_module,
    change_buffers,
    microbatch_inputs,
    reference_step,
    whole_buffers,
)

__all__ = [
    "accepted",
    "accumulation_of",
    "as_graph_module",
    "capture",
    "change_buffers",
    "first_rows",
    "microbatch_inputs",
    "reference_step",
    "whole_buffers",
]
