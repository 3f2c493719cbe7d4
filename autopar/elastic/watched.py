"""Ranks compared every so many steps of a run: a slow one is named by a warning of rank 0.

The last `N_MEASURED` steps before a comparison are measured. Then ranks exchange their times, a few
hundred bytes each.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from autopar.runtime.flight import Comparison, OwnTimes
from autopar.runtime.groups import current_context
from autopar.runtime.state import gathered, own_rank, world_size

N_MEASURED = 10


class Watched:
    """The pace of this rank beside the others, compared every `every` steps; never if None."""

    def __init__(self, every: int | None, stage: int) -> None:
        self._stage = stage
        self._every = every if world_size() > 1 else None
        self._pace = current_context().flight.pace
        if torch.cuda.is_available():
            self._pace.mark, self._pace.seconds = _mark, _seconds
        self._comparison = Comparison()

    def before(self, n_steps: int) -> None:
        """The step after `n_steps` begins."""
        if self._every is not None:
            self._pace.is_on = self._every - n_steps % self._every <= N_MEASURED

    def after(self, n_steps: int) -> None:
        """`n_steps` are done. A collective every `every` steps."""
        if self._every is None or n_steps % self._every:
            return
        self._pace.is_on = False
        ranks = gathered(OwnTimes(self._stage, self._pace.take()))
        if own_rank() == 0:
            for said in self._comparison.slow(ranks):
                warnings.warn(f"after {n_steps} steps: {said}", stacklevel=3)


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(before: Any, after: Any) -> float:
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3
