"""Plans and published runs are priced alike: the same layout, the same software, the same step."""

from __future__ import annotations

import pytest

from tests.helpers.nightly import nightly
from tests.helpers.planned_runs import RUNS, as_plan_s, by_items_s, read

# What is left: a model's own projections read their input one by one, and are not one matmul.
APART = 0.03


@nightly
@pytest.mark.parametrize("run_id", RUNS)
def test_a_run_takes_as_long_as_its_plan(run_id: str) -> None:
    run = read(run_id)
    assert as_plan_s(run) == pytest.approx(by_items_s(run), rel=APART)
