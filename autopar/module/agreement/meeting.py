"""One comparison between all ranks.

    all ranks    all_gather of two int64: what the rank compares, and a digest of it
    different    what every rank has is gathered, so that an error can name rank and value

Ranks that compare different things have made different calls: an error on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import BatchError
from autopar.module.agreement.hashes import digest
from autopar.runtime.flight import explained
from autopar.runtime.groups import DistGroup, current_context
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
    among: DistGroup | None = None,
    always: bool = False,
) -> dict[int, T] | None:
    """Rank -> what it has; None if that is the same for all.

    kind     a key of `CALLS`
    mine     its `repr` is compared
    among    the ranks that are compared; None: all of them
    always   gather what ranks have also if it is the same

    Each of these ranks must call it. Raises `BatchError` on every one if the kinds differ.
    """
    ranks = among.ranks if among else range(dist.get_world_size())
    group = among.process_group if among else None
    numbers = torch.tensor([_NUMBERS[kind], digest(mine)], device=device)
    everyone = torch.empty(2 * len(ranks), dtype=torch.int64, device=device)
    flight = current_context().flight
    with explained(flight.meeting(f"comparing ranks before {CALLS[kind]}")):
        dist.all_gather_single(everyone, numbers, group=group)
    kinds, digests = everyone.view(len(ranks), 2).T.tolist()
    if len(set(kinds)) > 1:
        names = list(CALLS)
        calls = {names[k]: [r for r, n in zip(ranks, kinds, strict=True) if n == k] for k in kinds}
        raise BatchError(
            "ranks call different things: "
            + ", ".join(f"{CALLS[k]} on {format_ranks(found)}" for k, found in calls.items()),
            hint="every rank must make the same calls in the same order",
        )
    if not always and len(set(digests)) == 1:
        return None
    values: list[T] = [mine] * len(ranks)
    with flight.meeting(f"naming what differs before {CALLS[kind]}"):
        dist.all_gather_object(values, mine, group)
    return dict(zip(ranks, values, strict=True))


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
