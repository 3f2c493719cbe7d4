"""A slow rank is named: own times without waits, compared over ranks of a stage."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Manual
from autopar.runtime.flight import Comparison, OwnTimes, Pace
from autopar.runtime.groups import current_context
from tests.helpers.jobs import machine
from tests.helpers.loading import SIZE, Rows, make
from tests.helpers.pools import Pool


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def pace(self) -> Pace:
        pace = Pace()
        pace.is_on, pace.mark = True, lambda: self.now_s
        return pace


def test_waits_are_not_own_time() -> None:
    clock = Clock()
    pace = clock.pace()
    for computes_s in (2.0, 4.0, 3.0):
        pace.begin("0F0")
        clock.now_s += computes_s
        with pace.waiting():
            clock.now_s += 100.0
        pace.begin("0B0")
        clock.now_s += 1.0
        pace.end()
        with pace.waiting():  # outside of a step
            clock.now_s += 1000.0
    assert pace.take() == {"0F0": 3.0, "0B0": 1.0}
    assert pace.take() == {}


def test_what_failed_or_was_not_asked_for_is_not_counted() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.begin("0F0")
    pace.drop()
    pace.is_on = False
    pace.begin("0B0")
    pace.end()
    assert pace.take() == {}


def test_a_rank_is_compared_with_its_stage() -> None:
    fast, slow = {"0F0": 0.010, "0B0": 0.020}, {"0F0": 0.010, "0B0": 0.050}
    other = {"1F0": 0.200, "1B0": 0.400}
    ranks = [OwnTimes(0, fast), OwnTimes(0, slow), OwnTimes(1, other), OwnTimes(1, other)]
    assert Comparison().slow(ranks) == [
        "rank 1 (stage 0) is slow: it computes 60 ms of a step, the other rank of its stage "
        "30 ms; most of that in action 0B0, 50 ms beside 20 ms"
    ]
    three = [OwnTimes(0, slow), OwnTimes(0, fast), OwnTimes(0, fast)]
    (said,) = Comparison().slow(three)
    assert said.startswith("rank 0 (stage 0) is slow") and "median of the other ranks" in said


@pytest.mark.parametrize("own_s", [0.0144, 0.0045])
def test_small_differences_are_not_named(own_s: float) -> None:
    usual_s = 0.010 if own_s > 0.010 else 0.001
    assert Comparison().slow([OwnTimes(0, {"0F0": usual_s}), OwnTimes(0, {"0F0": own_s})]) == []


def test_a_rank_alone_in_its_stage_is_compared_with_itself() -> None:
    comparison = Comparison()
    usual = [OwnTimes(stage, {f"{stage}F0": 0.01 * (stage + 1)}) for stage in range(3)]
    assert comparison.slow(usual) == []
    assert comparison.slow([OwnTimes(o.stage, {"F": 2 * o.step_s}) for o in usual]) == []
    assert comparison.slow([usual[0], OwnTimes(1, {"1F0": 0.05}), usual[2]]) == [
        "rank 1 (stage 1) is slow: it computes 50 ms of a step, 2.5 times as long as in its "
        "fastest steps; the others 1.0 times"
    ]


def slowed(folder: str, manual: dict[str, Any], slow_rank: int) -> list[str]:
    """What a run says whose rank computes longer from its second comparison on."""
    batch = torch.utils.data.default_collate([Rows()[i] for i in range(SIZE)])
    run = autopar.resilient(
        folder, make(), batch, save_every=100, compare_every=4,
        mesh=lambda n: machine((1, n)), manual=Manual(**manual),
    )  # fmt: skip
    rank, clock, pace = torch.distributed.get_rank(), Clock(), current_context().flight.pace

    def mark() -> float:
        """Time passes from look to look."""
        clock.now_s += 0.5 if rank == slow_rank and run.n_steps >= 4 else 0.1
        return clock.now_s

    pace.mark = mark
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for given in run.batches(run.pm.dataloader(Rows(), SIZE), n_steps=8):
            run.pm.step(**given)
    pace.mark = time.perf_counter
    return [str(w.message) for w in caught if "slow" in str(w.message)]


@pytest.mark.parametrize(("manual", "stage"), [({"dp": 2}, 0), ({"pp": 2}, 1)])
def test_a_rank_that_becomes_slow_is_named(
    workers: Pool, tmp_path: Path, manual: dict[str, Any], stage: int
) -> None:
    said, of_others = workers(2).run(slowed, str(tmp_path), manual, 1)
    assert of_others == []
    (text,) = said
    assert text.startswith(f"after 8 steps: rank 1 (stage {stage}) is slow: it computes")
