"""Frameworks on one rank train what they train without autopar, which imports none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import loop_jobs, trainer_jobs
from tests.integrations.weights import check_equal

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_loops(name: str, tmp_path: Path) -> None:
    wanted = loop_jobs.example(name, None, None, None)
    trained = loop_jobs.example(name, (1, 1), str(tmp_path), {})
    check_equal(trained["weights"], wanted["weights"], 1e-10)
    assert trained["losses"] == pytest.approx(wanted["losses"], abs=1e-10)


def test_trainer(tmp_path: Path) -> None:
    wanted, trained = (
        trainer_jobs.make_trainer("means", str(tmp_path), layout) for layout in (None, "alone")
    )
    for trainer in (wanted, trained):
        trainer.train()
    check_equal(trained.model.state_dict(), wanted.model.state_dict(), 1e-10)
    logs = (trainer_jobs.result(trainer)["logs"] for trainer in (trained, wanted))
    for of_one, of_other in zip(*logs, strict=True):
        assert of_one == pytest.approx(of_other, abs=1e-6)


def test_refused(tmp_path: Path) -> None:
    for words, text in trainer_jobs.refusals(str(tmp_path)).items():
        assert words in text
        assert "hint:" in text


_SCRIPT = """
import sys
for name in ("accelerate", "lightning", "pytorch_lightning", "transformers"):
    sys.modules[name] = None  # importing it raises
import autopar, autopar.integrations
for name in autopar.__all__:
    getattr(autopar, name)
"""


def test_autopar_needs_no_framework() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True)
