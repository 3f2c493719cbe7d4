"""Ranks of one life of a job agree on a word, beside what earlier lives left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from autopar import MeshError
from autopar.runtime.launch.fresh_store import _ROOT, agreed_life

N_RANKS = 3


def life(store: dist.Store, ranks: list[int], n_ranks: int = N_RANKS) -> set[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return set(threads.map(lambda rank: agreed_life(store, rank, n_ranks, 20.0), ranks))


def test_each_life_has_a_word_of_its_own() -> None:
    store = dist.HashStore()
    words = [life(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert all(len(found) == 1 for found in words)
    assert len(set.union(*words)) == 3
    assert len(life(store, [1, 0], n_ranks=2) | life(store, [0, 1, 2, 3], n_ranks=4)) == 2


def test_what_a_rank_that_died_early_left_is_not_taken_for_a_new_one() -> None:
    store = dist.HashStore()
    life(store, [0, 1, 2])
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(agreed_life, store, 1, N_RANKS, 20.0)
        with pytest.raises(MeshError, match=r"rank 2 did not join the job within 0\.5 s"):
            agreed_life(store, 0, N_RANKS, 0.5)
    (word,) = life(store, [0, 1, 2])
    assert word != early.result() and word in store.get(_ROOT).decode()


def test_a_rank_that_waits_for_the_first_names_it() -> None:
    with pytest.raises(MeshError, match=r"rank 0 did not join the job within 0\.1 s"):
        agreed_life(dist.HashStore(), 1, 2, 0.1)
