"""`software=`: what a plan would take under another stack, and that a plan keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, Mesh, Plan
from autopar.api import _options_beside
from autopar.cost.hardware import load_software
from autopar.cost.price import hidden_of, overlap_of
from autopar.errors import PlanError
from tests.helpers.commands import command, good
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.plans import bound_of, pipeline_of

A100 = Mesh((1, 4), hardware="a100-80gb")


class Wide(nn.Module):
    """Two layers with so much work that it is worth dividing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 16384), nn.Linear(16384, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).tanh().mean()


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


def test_matmuls_hide_their_collectives_under_software_that_does() -> None:
    """All but one chunk of n, forward and backward; other collectives, and other software, wait."""
    with torch.device("meta"):
        on = Wide(), A100, (torch.zeros(64, 4096),)
    made = autopar.plan(*on, manual=Manual(tp=4, sp=True), software="transformer-engine")
    (program,), (cost,) = pipeline_of(made).stages, bound_of(made).costs
    n_apart = 0
    for own, share in ((cost, 0.75), (replace(cost, hides_tp=False), 0.0)):
        found = overlap_of(program, own)
        for calls in (found.forward, found.backward):
            hidden_s, time_s = (
                [t for call, t in calls if call.under_matmul and (call.is_beside or every)]
                for every in (False, True)
            )
            assert time_s and sum(hidden_s) == pytest.approx(share * sum(time_s))
            apart = [call for call, _ in calls if not call.under_matmul]
            n_apart += len(apart)
            assert not any(call.is_beside for call in apart)
    assert n_apart, "nothing is apart from matmuls"


def test_the_search_knows_what_matmuls_hide() -> None:
    """What the solver minimised is what the step takes."""
    with torch.device("meta"):
        model, x = Wide(), torch.zeros(4096, 4096)
    made = autopar.plan(
        model, Mesh((1, 4), hardware="h100-sxm"), (x,), software="transformer-engine",
        forbid={"data"}, mesh_shape={"tp": 4},
    )  # fmt: skip
    (cost,) = bound_of(made).costs
    (row,) = hidden_of(pipeline_of(made), [cost], made.simulate())
    assert row.name == "activations" and row.hidden_s > 0.5 * row.time_s
    assert made.objective_s == pytest.approx(made.predicted.step_time_s, rel=1e-6)
    assert made.bound_s is not None and made.bound_s <= made.predicted.step_time_s


def test_the_slowest_rank_decides_under_other_software() -> None:
    """`slowest_of` times the simulated step; of autopar's own software it is not known."""
    made, own = plan(), plan("autopar")
    slowest = load_software("transformer-engine").slowest_of(4)
    assert slowest > 1.01
    assert made.predicted.step_time_s == pytest.approx(slowest * made.simulate().step_time_s)
    assert own.predicted.step_time_s == own.simulate().step_time_s
