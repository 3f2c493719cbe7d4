"""autopar's Megatron recipe against tensor-parallel GPT-2 written by hand and with DTensor: losses,
and collectives in number and bytes. The hand-written model has to pass the parity check too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.runtime.launch import WorkerPool
from examples.compare import (
    AUTO,
    BY_HAND,
    DTENSOR,
    RECIPE,
    Agreement,
    Size,
    agree,
    disagreements,
    median_ratio,
)
from examples.megatron_gpt2 import Call
from tests.helpers.jobs import BATCH, HEADS, N_STEPS, SEQUENCE, VOCABULARY, WIDTH, tokens
from tests.helpers.nightly import nightly

TINY = Size(2, WIDTH, HEADS, VOCABULARY, SEQUENCE)
SIZES = {
    "tiny": TINY,
    # By cost alone the embedding would be sharded by width, and the head by its summed dim.
    "tiny vocabulary": replace(TINY, vocabulary=8),
    "GELU by primitives": replace(TINY, activation="gelu_new"),
}


def trained(size: Size, pool: WorkerPool) -> list[Agreement]:
    """Labels are ignored unevenly; ids stay inside the smallest vocabulary."""
    data = [tokens(seed) for seed in range(N_STEPS)]
    for batch in data:
        batch["labels"] = batch["labels"].where(
            batch["labels"] < 0, batch["labels"] % size.vocabulary
        )
        batch["input_ids"] = batch["input_ids"] % size.vocabulary
    return pool.run(agree, size, data)


def megatron_calls(size: Size, itemsize: int = 8) -> Counter[Call]:
    """The formula of `examples/megatron_gpt2.py`: f and g of every layer and the embedding."""
    n_tokens = BATCH * SEQUENCE
    hidden_bytes = n_tokens * size.width * itemsize
    return Counter(
        {
            Call("all_reduce", "forward", hidden_bytes): 2 * size.n_layers + 1,
            Call("all_reduce", "backward", hidden_bytes): 2 * size.n_layers + 1,
            Call("all_reduce", "forward", n_tokens * itemsize): 3,
        }
    )


@nightly
@pytest.mark.parametrize("name", SIZES)
def test_parity_with_hand_written_megatron(name: str, workers: Callable[[int], WorkerPool]) -> None:
    size = SIZES[name]
    ranks = trained(size, workers(2))
    for found in ranks:
        assert disagreements(found) == []
        assert found.losses == ranks[0].losses
        assert len(set(found.losses[BY_HAND])) == N_STEPS
        for name in (RECIPE, DTENSOR, BY_HAND):
            assert found.calls[name] == megatron_calls(size)


def test_disagreements_are_noticed() -> None:
    calls = megatron_calls(TINY)
    names = (AUTO, RECIPE, DTENSOR, BY_HAND)
    good = Agreement({n: [1.0] for n in names}, dict.fromkeys(names, calls), {})
    assert disagreements(good) == []
    more = calls + Counter([Call("all_gather", "forward", 8)])
    for bad in (
        replace(good, losses=good.losses | {AUTO: [1.0 + 2e-10]}),
        replace(good, losses=good.losses | {BY_HAND: [float("nan")]}),
        replace(good, calls=good.calls | {RECIPE: more}),
        replace(good, calls=good.calls | {DTENSOR: more}),
        replace(good, planned={RECIPE: more}),
    ):
        assert len(disagreements(bad)) == 1


def test_the_ratio_and_its_interval() -> None:
    assert median_ratio([(2.0, 1.0)] * 15) == (2.0, 2.0, 2.0)
    ratio, low, high = median_ratio([(1.0 + i / 10, 1.0) for i in range(15)])
    assert ratio == pytest.approx(1.7)
    assert 1.0 < low < ratio < high < 2.4
