"""`imbalance=`: experts with unequal numbers of rows, in time and memory."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Manual, Mesh, Plan
from autopar.api import _options_beside
from autopar.errors import InfeasibleError
from tests.helpers.jobs import machine
from tests.helpers.models.moe_models import moe_model
from tests.helpers.nightly import nightly

RECIPE = Manual(dp=4, ep=4)


@lru_cache
def plan(manual: Manual = RECIPE, mesh: Mesh | None = None, **options: Any) -> Plan:
    """Of a mixture with so many rows that they are most of its memory."""
    ids = torch.zeros(256, 4, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    on = moe_model("mixtral"), mesh or machine((1, manual.n_ranks)), batch
    return autopar.plan(*on, manual=manual, microbatches=1, **options)


@nightly
def test_time_and_memory_grow_with_the_fullest_expert() -> None:
    even, uneven = plan().predicted, plan(imbalance=2.0).predicted
    assert uneven.compute_time_s > even.compute_time_s
    assert uneven.comm_time_s > even.comm_time_s
    assert uneven.peak_bytes > even.peak_bytes


def test_whole_experts_know_no_imbalance() -> None:
    recipe = Manual(dp=2)
    even, uneven = plan(recipe), plan(recipe, imbalance=2.0)
    assert even.predicted == uneven.predicted
    assert even.survives_imbalance is None
    assert "\nexperts:" not in even.explain()


def test_a_plan_says_which_imbalance_it_survives() -> None:
    peaks = [plan().predicted.peak_bytes, plan(imbalance=2.0).predicted.peak_bytes]
    limit = int(sum(peaks) / 2)
    limited = plan(memory_limit=limit)
    factor = limited.survives_imbalance
    assert factor is not None and 1 < factor < 2
    assert "the fullest expert has 1 times the mean of rows; memory suffices for " in (
        limited.explain()
    )
    survives = plan(memory_limit=limit, imbalance=factor)
    assert survives.predicted.peak_bytes == pytest.approx(limit, rel=1e-3)
    with pytest.raises(InfeasibleError):
        plan(memory_limit=limit, imbalance=1.1 * factor)
    assert plan().survives_imbalance == 4, "all rows may be of one rank"


def test_a_plan_keeps_its_imbalance(tmp_path: Path) -> None:
    """In its file, on another machine, and in the command that makes it again."""
    made = plan(RECIPE, Mesh((1, 4), hardware="a100-80gb"), imbalance=2.0)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").bind(moe_model("mixtral"))
    assert loaded.predicted == made.predicted
    assert "imbalance=2.0" in loaded.command()
    options = _options_beside(loaded, {}), _options_beside(loaded, {"imbalance": 1.5})
    assert [given["imbalance"] for given in options] == [2.0, 1.5]
    slower = "device.peak_bytes_per_s=0.5x"
    assert made.what_if(slower).predicted.peak_bytes == made.predicted.peak_bytes
