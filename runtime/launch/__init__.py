"""launch."""

from autopar.runtime.launch.processes import WorkerPool, init_from_environment, launch
from autopar.runtime.launch.threads import ThreadWorld, run_threads

__all__ = [
    "ThreadWorld",
    "WorkerPool",
    "init_from_environment",
    "launch",
    "run_threads",
]
