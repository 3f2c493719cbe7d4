"""Worker processes that tests share: one pool, whose first ranks serve jobs of fewer ranks too,
in a new process group; a process imports for several seconds, so few are started."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist

from autopar.runtime.launch import WorkerPool
from tests.helpers.captures import share_captures

Pool = Callable[[int], WorkerPool]  # the fixture `workers`: number of ranks -> their pool
MOST_RANKS = 4
TIMEOUT_S = 240.0
_n_joined = 0  # in a worker: which change it has made last


class Shared:
    """The pool; how many ranks its last job had, and how often that has changed."""

    def __init__(self) -> None:
        self._pool = WorkerPool(MOST_RANKS, TIMEOUT_S)
        self._n_ranks = MOST_RANKS
        self._n_changes = 0

    def first(self, n_ranks: int) -> WorkerPool:
        assert n_ranks <= MOST_RANKS
        return _FirstRanks(n_ranks, self)

    def run(self, n_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """The results of the first ranks."""
        self._n_changes += n_ranks != self._n_ranks
        self._n_ranks = n_ranks
        how = n_ranks, self._n_changes, gc.get_threshold()
        return self._pool.run(_on_rank, *how, fn, args)[:n_ranks]


class _FirstRanks(WorkerPool):
    """The first workers of the pool, as a world of their own."""

    def __init__(self, n_ranks: int, shared: Shared) -> None:
        super().__init__(n_ranks, TIMEOUT_S)
        self._shared = shared

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._shared.run(self.n_ranks, fn, args)


def _on_rank(
    n_ranks: int, n_changes: int, thresholds: tuple[int, int, int],
    fn: Callable[..., Any], args: tuple[Any, ...],
) -> Any:  # fmt: skip
    """The job of one worker; None from those that it does not need."""
    _prepare(thresholds)
    if int(os.environ["RANK"]) >= n_ranks:
        return None
    _join(n_ranks, n_changes)
    return fn(*args)


def _join(n_ranks: int, n_changes: int) -> None:
    """Be one of `n_ranks`, unless this process is already; new ones are of all ranks."""
    global _n_joined
    if _n_joined == n_changes:
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"world {n_changes}", dist.TCPStore(address, port, is_master=False))
    dist.destroy_process_group()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_ranks)
    os.environ["WORLD_SIZE"] = str(n_ranks)
    _n_joined = n_changes


@cache
def _prepare(thresholds: tuple[int, int, int]) -> None:
    """Once in every process: garbage is collected as by the caller, and captures are shared."""
    gc.set_threshold(*thresholds)
    share_captures()
