"""Traces the user's module, on fake tensors, to one ATen graph.

Read: `kinds.py` (what is no model, and no input); `isolate.py`, `norms.py` (the fake copy);
`identity.py` (tables that would not know the copy); `export.py` (the trace); `equal_layers.py` and
`layer_copies.py` (one of equal layers is traced); `exchange.py`, with `functions.py`,
`checkpointed.py`, `derivatives.py`, `transforms.py` (`autograd.Function`, `torch.utils.checkpoint`,
`torch.autograd.grad` and `torch.func` in the trace); `replaced.py` and `flex.py` (functions that
cannot be traced), `expert_loops.py` with `expert_bodies.py` (loops over experts), `checks.py`
(checks that only raise); `known.py` (values of constants);
`quiet.py` (what torch prints); `grad_modes.py` (gradients off), `regions.py` (autocast off),
`seeds.py` (generators that forward seeds).
May import `names.py`, `findings.py` and `python_state` of `capture`, and what `capture` may import.
Mainly hands on `export_model` for `capture/pipeline.py`, and what later steps ask of a traced node.
"""

from autopar.capture.trace.checkpointed import REGION, checkpointed_regions, note_regions
from autopar.capture.trace.export import LossFn, WithLoss, accepted, export_model
from autopar.capture.trace.grad_modes import GRAD_ENABLED
from autopar.capture.trace.isolate import cast_at_door, fake_like, fake_mode
from autopar.capture.trace.kinds import check_kind, check_leaves
from autopar.capture.trace.regions import substitute
from autopar.capture.trace.seeds import SEEDED

__all__ = [
    "GRAD_ENABLED",
    "REGION",
    "SEEDED",
    "LossFn",
    "WithLoss",
    "accepted",
    "cast_at_door",
    "check_kind",
    "check_leaves",
    "checkpointed_regions",
    "export_model",
    "fake_like",
    "fake_mode",
    "note_regions",
    "substitute",
]
