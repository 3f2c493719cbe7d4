"""Operators that autopar registers with torch when this package is imported.

Capture puts them in place of ATen operators that hide what is needed to shard them.
Read `random.py` (random numbers by global index) and `experts.py` (matmuls per expert).
It imports torch only.
It hands on `DROPOUT`, `UNIFORM`, `Stream` and the module `experts`.
"""

from autopar.operators import experts, random
from autopar.operators.random import DROPOUT, UNIFORM, Stream, seed_tensor, step_seed

__all__ = [
    "DROPOUT",
    "UNIFORM",
    "Stream",
    "experts",
    "random",
    "seed_tensor",
    "step_seed",
]
