"""Decides how one rank executes the generated programs of its stages for a training step.

Read `executor.py` (the step), `stage_runner.py` (one stage of it), `code.py` (what a generated file
is), `delivery.py` (inputs per microbatch), `conversions.py`,
`bucketed.py` and `returns.py` (parameters and gradients between storage and use), then `load.py`
(generated files) and `compiled.py` (their regions).
It imports `runtime/collectives` and `runtime/groups`, and may not import `launch`, its neighbour.

Mainly hands on `Executor`, `Environment` and `load_code`.
"""

from autopar.runtime.execute.code import Environment, StageCode
from autopar.runtime.execute.compiled import (
    compiled,
    graphed,
    lacking,
    require_compiler,
    tell_when_compiled,
)
from autopar.runtime.execute.delivery import batch_index, shard
from autopar.runtime.execute.executor import Executor
from autopar.runtime.execute.load import load_code

__all__ = [
    "Environment",
    "Executor",
    "StageCode",
    "batch_index",
    "compiled",
    "graphed",
    "lacking",
    "load_code",
    "require_compiler",
    "shard",
    "tell_when_compiled",
]
