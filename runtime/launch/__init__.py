"""Decides how the ranks of a job are started on one machine: as processes or as threads.

Read `processes.py` (local worker processes, torchrun's environment), `fresh_store.py` (torchrun's
store after a restart), `travel.py` (what is pickled between processes), `threads.py` (ranks as
threads, the in-process oracle of tests), then `thread_messages.py` (messages between thread ranks).
It imports the rooms of the runtime below it (`flight`, `groups`, `collectives`), and may not import
`execute`, its neighbour.

Mainly hands on `launch`, `init_from_environment` and `run_threads`.
"""

from autopar.runtime.launch.processes import WorkerPool, init_from_environment, launch
from autopar.runtime.launch.threads import ThreadWorld, run_threads

__all__ = [
    "ThreadWorld",
    "WorkerPool",
    "init_from_environment",
    "launch",
    "run_threads",
]
