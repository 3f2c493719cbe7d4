"""One comparison between all ranks.

    all ranks    all_gather of two int64: what the rank compares, and a digest of it
    different    what every rank has is gathered, so that an error can name rank and value

Ranks that compare different things have made different calls: an error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import BatchError
from autopar.module.agreement.hashes import digest
from autopar.runtime.flight import explained
from autopar.runtime.groups import current_context
from autopar.units import format_ranks

T = TypeVar("T")

# What is compared -> the call that compares it.
CALLS = {
    "settings": "autopar.parallelize(...)",
    "plan": "planning",
    "buffers": "autopar.parallelize(...)",
    "graph": "capturing a program",
    "program": "capturing a program",
    "step": "pm.step(...)",
    "local step": 'pm.step(..., batch="local")',
    "evaluation": "pm(...)",
    "loss": "pm.loss(...)",
    "optimizer": "optimizer.step()",
}
_NUMBERS = {kind: number for number, kind in enumerate(CALLS)}


def has_others() -> bool:
    """Does the job have several ranks?"""
    return dist.is_initialized() and dist.get_world_size() > 1


def compared(
    kind: str,
    mine: T,
    device: torch.device,
    alike: Sequence[Sequence[int]] | None = None,
    always: bool = False,
) -> list[T] | None:
    """What every rank has, in rank order; None if that is the same.

    kind     a key of `CALLS`
    mine     its `repr` is compared
    alike    ranks that must have the same as each other; None: all of them
    always   gather what ranks have also if it is the same

    Every rank must call it. Raises `BatchError` on every rank if the kinds differ.
    """
    n_ranks = dist.get_world_size()
    numbers = torch.tensor([_NUMBERS[kind], digest(mine)], device=device)
    everyone = torch.empty(2 * n_ranks, dtype=torch.int64, device=device)
    flight = current_context().flight
    with explained(flight.meeting(f"comparing ranks before {CALLS[kind]}")):
        dist.all_gather_single(everyone, numbers)
    kinds, digests = everyone.view(n_ranks, 2).T.tolist()
    if len(set(kinds)) > 1:
        names = list(CALLS)
        calls = {names[k]: [r for r in range(n_ranks) if kinds[r] == k] for k in kinds}
        raise BatchError(
            "ranks call different things: "
            + ", ".join(f"{CALLS[k]} on {format_ranks(ranks)}" for k, ranks in calls.items()),
            hint="every rank must make the same calls in the same order",
        )
    classes = alike or [range(n_ranks)]
    if not always and all(len({digests[r] for r in ranks}) == 1 for ranks in classes):
        return None
    values: list[T] = [mine] * n_ranks
    with flight.meeting(f"naming what differs before {CALLS[kind]}"):
        dist.all_gather_object(values, mine)
    return values


@dataclass
class Due:
    """Which of many equal calls compare ranks: the first ones, then every n-th.

    every   None: only the first ones
    """

    every: int | None
    _n_calls: dict[str, int] = field(default_factory=dict)

    def __call__(self, kind: str, n_first: int) -> bool:
        """Count a call; is it to be compared?"""
        if not has_others():
            return False
        n = self._n_calls[kind] = self._n_calls.get(kind, 0) + 1
        return n <= n_first or (self.every is not None and n % self.every == 0)
