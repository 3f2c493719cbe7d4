"""Capture: an ordinary PyTorch model and a batch -> one frozen, normalised `Program`.

Reading order: `pipeline`, `accumulate`, `isolate`, `export`, `regions`, `inplace` with
`view_writes`, `buffers`, `normalise` with `rewrites/`, `dependence`, `constants`, `prologue`;
`reference` runs the result.
"""

from autopar.capture.accumulate import accumulation_of
from autopar.capture.pipeline import capture
from autopar.capture.reference import (
    as_graph_module,
    change_buffers,
    microbatch_inputs,
    reference_step,
    whole_buffers,
)

__all__ = [
    "accumulation_of",
    "as_graph_module",
    "capture",
    "change_buffers",
    "microbatch_inputs",
    "reference_step",
    "whole_buffers",
]
