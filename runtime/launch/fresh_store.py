"""A store without what earlier lives of the job wrote, where torchrun starts ranks again.

With `--rdzv-backend=c10d`, torchrun keeps one store for all lives of a job (torch 2.13,
`DynamicRendezvousHandler.next_rendezvous`). So the ranks of a second life find the addresses of the
first, and wait for dead processes (pytorch/pytorch#135712). `TORCHELASTIC_RESTART_COUNT` is of one
node: those whose ranks did not fail count no restart. So the ranks agree on a word of this life,
and all their keys begin with it:

    rank r     writes hello/r = a word of its own, new in each life
    rank 0     writes `life` = its word and all that it read, whenever one of them has changed
    rank r     waits until `life` has its word: then it is of this life; writes ready/<0's word>/r
    rank 0     waits for ready/<its word>/1 ... : all ranks have read the same
"""

from __future__ import annotations

import json
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from autopar.errors import MeshError
from autopar.units import format_ranks

_POLL_S = 0.02
JOIN_TIMEOUT_S = 300.0
_ROOT = "autopar/life"


def is_kept_store() -> bool:
    """Does torchrun host a store that outlives the ranks?"""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return by_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_torchrun() -> dist.Store:
    """torchrun's store, with a prefix of this life. Every rank must call it."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
    )  # fmt: skip
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return dist.PrefixStore(agreed_life(store, rank, n_ranks), store)


def agreed_life(
    store: dist.Store, rank: int, n_ranks: int, timeout_s: float = JOIN_TIMEOUT_S
) -> str:
    """A word that the ranks of this life share, and no earlier one had.

    Raises `MeshError` if not all ranks come within `timeout_s`.
    """
    own, deadline_s = secrets.token_hex(8), time.monotonic() + timeout_s
    if rank > 0:
        store.set(f"{_ROOT}/hello/{rank}", own)
        while time.monotonic() < deadline_s:
            if store.check([_ROOT]):
                life, words = json.loads(store.get(_ROOT))
                if words.get(str(rank)) == own:
                    store.set(f"{_ROOT}/ready/{life}/{rank}", "")
                    return str(life)
            time.sleep(_POLL_S)
        raise _absent([0], timeout_s)
    written: dict[str, str] | None = None
    while time.monotonic() < deadline_s:
        greeted = [r for r in range(1, n_ranks) if store.check([f"{_ROOT}/hello/{r}"])]
        words = {str(r): store.get(f"{_ROOT}/hello/{r}").decode() for r in greeted}
        if words != written:
            store.set(_ROOT, json.dumps([own, words]))
            written = words
        if not _not_ready(store, own, n_ranks):
            return own
        time.sleep(_POLL_S)
    raise _absent(_not_ready(store, own, n_ranks), timeout_s)


def _not_ready(store: dist.Store, life: str, n_ranks: int) -> list[int]:
    return [r for r in range(1, n_ranks) if not store.check([f"{_ROOT}/ready/{life}/{r}"])]


def _absent(ranks: list[int], timeout_s: float) -> MeshError:
    return MeshError(
        f"{format_ranks(ranks)} did not join the job within {timeout_s:g} s",
        hint="every rank must come to autopar.parallelize or autopar.resilient; what torchrun says "
        "of the others may tell why they did not",
    )
