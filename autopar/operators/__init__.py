"""Operators that autopar registers with torch when this package is imported.

Capture puts them in place of ATen operators that hide what is needed to shard them.
Read `random.py` (random numbers by global index), `scores.py` (attention in blocks of rows),
`attention.py` (with dropout), `ranges.py` (of each row to a range of keys),
`gates.py` (activations of experts), `experts.py` (matmuls per expert), `bags.py` (sums of looked-up
rows), `ctc.py` (a loss per row), `workspace.py` (their temporaries), `functions.py` and
`function_probe.py` (operators made of `torch.autograd.Function` classes).
It imports torch and `precision` only.
It mainly hands on `ATTENTION_DROPOUT`, `DROPOUT`, `UNIFORM`, `Stream`, `function_call`, and the
modules `bags`, `ctc`, `experts` and `gates`.
"""

from autopar.operators import attention, bags, ctc, experts, gates, random, ranges, scores
from autopar.operators.attention import ATTENTION_DROPOUT
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
from autopar.operators.ranges import ATTENTION_RANGES, COUNT_BELOW
from autopar.operators.workspace import workspace_bytes

__all__ = [
    "ATTENTION_DROPOUT",
    "ATTENTION_RANGES",
    "COUNT_BELOW",
    "DROPOUT",
    "NAMESPACE",
    "UNIFORM",
    "FunctionOperator",
    "Stream",
    "UnsupportedFunctionError",
    "attention",
    "bags",
    "ctc",
    "experts",
    "full_name",
    "function_call",
    "function_of",
    "gates",
    "is_same_function",
    "random",
    "ranges",
    "scores",
    "seed_tensor",
    "step_seed",
    "untraced",
    "workspace_bytes",
]
