"""Operators that autopar registers with torch when this package is imported.

Capture puts them in place of ATen operators that hide what is needed to shard them.
Read `random.py` (random numbers by global index), `experts.py` (matmuls per expert), `functions.py`
and `function_probe.py` (operators made of `torch.autograd.Function` classes).
It imports torch only.
It hands on `DROPOUT`, `UNIFORM`, `Stream`, `function_call` and the module `experts`.
"""

from autopar.operators import experts, random
from autopar.operators.function_probe import UnsupportedFunctionError, untraced
from autopar.operators.functions import (
    NAMESPACE,
    FunctionOperator,
    full_name,
    function_call,
    function_of,
    is_same_function,
)
from autopar.operators.random import DROPOUT, UNIFORM, Stream, seed_tensor, step_seed

__all__ = [
    "DROPOUT",
    "NAMESPACE",
    "UNIFORM",
    "FunctionOperator",
    "Stream",
    "UnsupportedFunctionError",
    "experts",
    "full_name",
    "function_call",
    "function_of",
    "is_same_function",
    "random",
    "seed_tensor",
    "step_seed",
    "untraced",
]
