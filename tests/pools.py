"""Worker processes that tests share: one pool, whose first ranks serve jobs of fewer ranks too.

A process imports for several seconds and captures each model that it runs, so as few as can be are
started. Ranks that were another number for the job before join a new process group first, as
torchrun's workers do after a restart.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist

from autopar.runtime.launch import WorkerPool, init_from_environment
from tests.captures import share_captures

TIMEOUT_S = 240.0


class Pools:
    """Number of ranks -> workers: the first of a pool that is large enough, or of a new one."""

    def __init__(self) -> None:
        self._started: list[_Shared] = []

    def __call__(self, n_ranks: int) -> WorkerPool:
        large = [shared for shared in self._started if shared.pool.n_ranks >= n_ranks]
        if not large:
            large = [_Shared(WorkerPool(n_ranks, TIMEOUT_S))]
            self._started += large
        return _FirstRanks(n_ranks, large[0])


class _Shared:
    """A pool; how many ranks its last job had, and how often that has changed."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._n_ranks = pool.n_ranks
        self._n_changes = 0

    def run(self, n_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """The results of the first ranks."""
        self._n_changes += n_ranks != self._n_ranks
        self._n_ranks = n_ranks
        return self.pool.run(_on_rank, n_ranks, self._n_changes, gc.get_threshold(), fn, args)


class _FirstRanks(WorkerPool):
    """The first workers of a pool, as a world of their own."""

    def __init__(self, n_ranks: int, shared: _Shared) -> None:
        super().__init__(n_ranks, TIMEOUT_S)
        self._shared = shared

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._shared.run(self.n_ranks, fn, args)[: self.n_ranks]


def _on_rank(
    n_ranks: int, n_changes: int, thresholds: tuple[int, int, int],
    fn: Callable[..., Any], args: tuple[Any, ...],
) -> Any:  # fmt: skip
    """The job of one worker; None from those that it does not need."""
    _prepare(thresholds)
    if int(os.environ["RANK"]) >= n_ranks:
        return None
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != str(n_changes):
        dist.destroy_process_group()
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(n_ranks)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(n_changes)
        init_from_environment()
    return fn(*args)


@cache
def _prepare(thresholds: tuple[int, int, int]) -> None:
    """Once in every process: garbage is collected as by the caller, and captures are shared."""
    gc.set_threshold(*thresholds)
    share_captures()
