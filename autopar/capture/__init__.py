"""Capture: an ordinary PyTorch model and a batch -> one frozen, normalised `Program`.

Reading order: `pipeline`, `isolate`, `export`, `regions`, `inplace` with `view_writes`,
`buffers`, `normalise`
with its table `rewrites` and `losses`, `dependence`, `constants`, `prologue`; `reference` runs
the result.
"""

from autopar.capture.pipeline import capture
from autopar.capture.reference import (
    as_graph_module,
    change_buffers,
    reference_step,
    whole_buffers,
)

__all__ = ["as_graph_module", "capture", "change_buffers", "reference_step", "whole_buffers"]
