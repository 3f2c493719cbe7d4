"""A rendezvous of all ranks before a call that gathers state: who is missing is named.

`if rank == 0: pm.full_state_dict()` would wait in a collective that the others never join. So each
rank first leaves a mark in the store of the process group, and waits for the marks of the others.
The store needs no other rank's help, so a rank that waits in vain can say for whom. It costs about
a millisecond.

    meeting n    rank r writes n/r = what it calls, and waits for n/0 ... n/(size - 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.errors import AbsentRanksError
from autopar.runtime.flight import explained, seconds_in
from autopar.runtime.groups.group import current_context
from autopar.units import format_ranks

# Ranks may come late: one of them evaluates, or writes a file, before it joins.
DEFAULT_TIMEOUT_S = 120.0
TIMEOUT = "AUTOPAR_RENDEZVOUS_TIMEOUT_S"
_n_meetings: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@contextmanager
def together_in(what: str) -> Iterator[None]:
    """All ranks make the call `what`, once all have come: it is noted until the block is left.

    Raises `AbsentRanksError` if a rank does not come within the seconds that the environment
    variable `AUTOPAR_RENDEZVOUS_TIMEOUT_S` sets, or if it calls something else.
    """
    with explained(current_context().flight.together(what)):
        _meet(what)
        yield


def _meet(what: str) -> None:
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    n, rank, size = _n_meetings.get(group, 0), dist.get_rank(), dist.get_world_size()
    keys = [_key(n, r) for r in range(size)]
    timeout_s = seconds_in(TIMEOUT) or DEFAULT_TIMEOUT_S
    store.set(keys[rank], what)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = [r for r, key in enumerate(keys) if not store.check([key])]
        if not absent:  # the last one came just now, or the store itself has failed
            raise
        store.delete_key(keys[rank])
        raise AbsentRanksError(
            f"{what}: {format_ranks(absent)} of {size} ranks did not call it "
            f"within {timeout_s:g} s",
            hint="every rank must call it: take `if rank == 0` away, it gives {} to the others. "
            f"If ranks come later than that, set {TIMEOUT}",
        ) from error
    _n_meetings[group] = n + 1
    if n:  # all have left the meeting before, because all have come to this one
        store.delete_key(_key(n - 1, rank))
    calls = [store.get(key).decode() for key in keys]
    others = [r for r, call in enumerate(calls) if call != what]
    if others:
        raise AbsentRanksError(
            f"{what}: {format_ranks(others)} called {calls[others[0]]} instead",
            hint="every rank must make the same calls in the same order",
        )


def _key(n: int, rank: int) -> str:
    return f"autopar/meeting {n}/{rank}"
