"""Capture: an ordinary PyTorch model and a batch -> one frozen, normalised `Program`.

Reading order: `pipeline`, `isolate`, `export`, `inplace` with `view_writes`, `normalise`
with its table `rewrites` and `losses`, `dependence`, `constants`, `prologue`; `reference` runs
the result.
"""

from autopar.capture.pipeline import capture
from autopar.capture.reference import as_graph_module, reference_step

__all__ = ["as_graph_module", "capture", "reference_step"]
