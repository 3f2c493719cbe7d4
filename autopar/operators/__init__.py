"""Operators of autopar's own, registered with torch when this package is imported.

Capture writes them in place of ATen operators that say less than what is meant.
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
