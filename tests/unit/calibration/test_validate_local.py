"""Predictions beside measurements on this machine: one small plan, no timing compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

import autopar
from autopar.cost.hardware import load_profile
from autopar.runtime.launch import WorkerPool
from examples import validate_local
from examples.validate_local import Measured, Training, rank_correlation, verdict
from tests.helpers.nightly import nightly

ROW = Measured("GPT-2", 2, "dp", 0.1, (0.1, 0.09, 0.2), (100.0, 50.0), (99.0, 55.0))


def one_plan() -> Measured:
    """Run and describe one plan, in a worker process."""
    mesh = autopar.Mesh((1, dist.get_world_size()), hardware="cpu-local")
    training = Training("Llama", "tp", mesh, manual=autopar.Manual(tp=2), microbatches=1)
    assert training.step_time_s() > 0
    return training.described()


@nightly
def test_peaks_of_a_plan_that_runs(workers: Callable[[int], WorkerPool]) -> None:
    for row in workers(2).run(one_plan):
        assert (row.model, row.n_ranks, row.plan) == ("Llama", 2, "tp")
        assert row.predicted_s > 0
        assert len(row.live_bytes) == 2
        assert abs(row.memory_error) < validate_local.MOST_MEMORY_ERROR


def products_alone() -> tuple[float, float]:
    """(predicted, measured) seconds of the yardstick, in a worker process."""
    mesh = autopar.Mesh((1, dist.get_world_size()), hardware="cpu-local")
    yardstick = validate_local.Yardstick(mesh)
    return yardstick.described().predicted_s, yardstick.step_time_s()


@nightly
def test_yardstick(workers: Callable[[int], WorkerPool]) -> None:
    flops = 8 * 2 * math.prod(validate_local.YARDSTICK)
    rate = load_profile("cpu-local").rates_flops_per_s()["float32"]
    for predicted_s, time_s in workers(2).run(products_alone):
        assert predicted_s == pytest.approx(flops / rate, rel=0.01)
        assert time_s > 0


def test_rank_correlation_sees_order_only() -> None:
    values = [0.1, 0.4, 0.2, 0.9]
    assert rank_correlation(values, [math.exp(v) for v in values]) == pytest.approx(1.0)
    assert rank_correlation(values, [-v for v in values]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"predicted_s": 0.2}, False),
        ({"times_s": (0.3, 0.3, 0.3)}, False),
        ({"live_bytes": (99.0, 70.0)}, False),
    ],
)
def test_verdict(change: dict[str, object], holds: bool) -> None:
    slower = replace(ROW, predicted_s=0.19, times_s=(0.2, 0.2, 0.2))
    rows = [replace(ROW, **change), slower]  # type: ignore[arg-type]
    unmeasured = replace(ROW, predicted_s=9.0, predicted_bytes=(), live_bytes=())
    text, is_good = verdict([*rows, unmeasured])
    assert is_good is holds
    assert "2 plans" in text
