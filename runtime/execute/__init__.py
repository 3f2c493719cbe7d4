"""execute."""

from autopar.runtime.execute.delivery import batch_index, shard
from autopar.runtime.execute.executor import Environment, Executor
from autopar.runtime.execute.load import load_code

__all__ = [
    "Environment",
    "Executor",
    "batch_index",
    "load_code",
    "shard",
]
