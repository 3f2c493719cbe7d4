"""`software=`: what a plan would take under another stack, and that a plan keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Manual, Mesh, Plan
from autopar.api import _options_beside
from autopar.errors import PlanError
from tests.helpers.commands import command, good
from tests.helpers.models.tiny_model import Tiny, batch

A100 = Mesh((1, 4), hardware="a100-80gb")


def tiny() -> tuple[Any, Any]:
    """A model factory for the command line."""
    return Tiny(), batch()


def plan(software: str = "transformer-engine") -> Plan:
    return autopar.plan(Tiny(), A100, batch(), manual=Manual(dp=2, tp=2), software=software)


def test_a_plan_keeps_its_software(tmp_path: Path) -> None:
    """In its file, on another machine, in words, and in the command that makes it again."""
    made = plan()
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").bind(Tiny())
    assert loaded.predicted == made.predicted
    assert "\nassumed: a100-80gb under transformer-engine, " in made.explain()
    assert "software='transformer-engine'" in loaded.command()
    options = _options_beside(loaded, {}), _options_beside(loaded, {"software": "autopar"})
    assert [given["software"] for given in options] == ["transformer-engine", "autopar"]
    same = "device.peak_bytes_per_s=1x"
    assert loaded.what_if(same).predicted.step_time_s == made.predicted.step_time_s


def test_commands_keep_it(tmp_path: Path) -> None:
    """What a command plans under a software, another one explains from its file alike."""
    model, path = f"{__name__}:tiny", str(tmp_path / "plan.json")
    flags = "--mesh", "1x2", "--hardware", "a100-80gb", "--software", "transformer-engine"
    made = good(command("plan", model, *flags, "--manual", "tp=2", "-o", path, "--json"))
    loaded = good(command("explain", path, "--model", model, "--json"))
    assert loaded["predicted"] == made["predicted"]
    assert "a100-80gb under transformer-engine" in loaded["text"]


def test_an_unknown_software_in_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    path.write_text(path.read_text().replace("transformer-engine", "transformer-steam"))
    with pytest.raises(PlanError, match=r"software.*transformer-steam"):
        Plan.load(path)
