"""Operators that autopar registers with torch when this package is imported.

Capture puts them in place of ATen operators that hide what is needed to shard them.
Read `random.py` (random numbers by global index), `attention.py` (attention with dropout) and
`experts.py` (matmuls per expert).
It imports torch and `precision` only.
It hands on `ATTENTION_DROPOUT`, `DROPOUT`, `UNIFORM`, `Stream` and the module `experts`.
"""

from autopar.operators import attention, experts, random
from autopar.operators.attention import (
    ATTENTION_DROPOUT,
    ATTENTION_DROPOUT_KERNEL,
    workspace_bytes,
)
from autopar.operators.random import DROPOUT, UNIFORM, Stream, seed_tensor, step_seed

__all__ = [
    "ATTENTION_DROPOUT",
    "ATTENTION_DROPOUT_KERNEL",
    "DROPOUT",
    "UNIFORM",
    "Stream",
    "attention",
    "experts",
    "random",
    "seed_tensor",
    "step_seed",
    "workspace_bytes",
]
