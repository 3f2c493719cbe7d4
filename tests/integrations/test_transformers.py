"""The Hugging Face Trainer on two ranks trains what it trains on one process without autopar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import autopar
from tests.helpers.nightly import nightly
from tests.integrations.trainer_jobs import LAYOUTS, WAYS, job
from tests.integrations.weights import check_equal

pytestmark = nightly
# The loss of Hugging Face's language models is float32, also for a model in float64. Two ranks
# that share a vocabulary add it up in another order.
FLOAT32, FLOAT64 = 2e-6, 1e-10
CASES = [("accumulated", "tp"), ("accumulated", "pp"), *((way, "zero3") for way in WAYS)]
Results = tuple[Path, list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("alone")
    return folder, autopar.launch(job, 1, str(folder), [None])


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("parallel")
    return folder, autopar.launch(job, 2, str(folder), list(LAYOUTS))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_trains_as_one_process(name: str, layout: str, alone: Results, parallel: Results) -> None:
    wanted, tolerance = alone[1][0][None][name], FLOAT32 if layout == "tp" else FLOAT64
    for rank in parallel[1]:
        found = rank[layout][name]
        check_equal(found["weights"], wanted["weights"], tolerance)
        check_logs(found["logs"], wanted["logs"])
        if layout != "pp":
            assert found["norms"] == pytest.approx(wanted["norms"], rel=tolerance)


def check_logs(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=FLOAT32, rel=FLOAT32)


def test_model_is_saved_in_its_own_format(alone: Results, parallel: Results) -> None:
    folders = [alone[0] / "None" / "saved", parallel[0] / "zero3" / "saved"]
    wanted, found = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
    check_equal(found, wanted, FLOAT64)
    wanted_files, found_files = ({file.name for file in f.iterdir()} for f in folders)
    assert found_files == wanted_files


def test_resumes_and_loads_the_best(alone: Results, parallel: Results) -> None:
    wanted = alone[1][0]["resumed"]
    for rank in parallel[1]:
        for one, other in zip(rank["resumed"], wanted, strict=True):
            check_equal(one["weights"], other["weights"], FLOAT64)
            check_logs(one["logs"], other["logs"])


def test_example(alone: Results, parallel: Results) -> None:
    wanted = alone[1][0]["example"]
    for rank in parallel[1]:
        check_equal(rank["example"]["weights"], wanted["weights"], 1e-5)
        assert rank["example"]["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
