"""Loops of torch, Accelerate and Lightning on two ranks train what they train on one process."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from tests.helpers.nightly import nightly
from tests.integrations.loop_jobs import EXAMPLES, LAYOUTS, REFUSED, alone, parallel
from tests.integrations.weights import check_equal

pytestmark = nightly
Ranks = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    (results,) = autopar.launch(alone, 1)
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return autopar.launch(parallel, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_trains_as_one_process(name: str, layout: str, one: dict[str, Any], two: Ranks) -> None:
    wanted = one[name]
    check_equal(two[0][name, layout]["weights"], wanted["weights"], 1e-10)
    for rank in two:
        found = rank[name, layout]
        assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-10)
        assert found.get("rates") == wanted.get("rates")


def test_checkpoint_of_lightning_is_loaded(one: dict[str, Any], two: Ranks) -> None:
    check_equal(two[0]["loaded"], one["lightning"]["weights"], 1e-10)


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, two: Ranks) -> None:
    for rank in two:
        assert words in rank["refused"][words]
        assert "hint:" in rank["refused"][words]
