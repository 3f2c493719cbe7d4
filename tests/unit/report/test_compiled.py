"""What is said and predicted of plans that run in compiled regions."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Mesh, Plan
from autopar.report import compiling


class Block(nn.Module):
    """A norm, and a GELU of primitives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + self.down(0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.04 * y.pow(3)))))


@lru_cache
def model(width: int = 64) -> nn.Module:
    return nn.Sequential(Block(width), Block(width))


def squared(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().mean()


@lru_cache
def planned(compile: str, hardware: str = "cpu-local") -> Plan:
    batch, mesh = (torch.zeros(256, 64),), Mesh((1, 2), hardware=hardware)
    return autopar.plan(model(), mesh, batch, loss_fn=squared, stages=1, compile=compile)


def line(plan: Plan) -> str:
    return "".join(t for t in plan.explain().splitlines() if t.startswith("compiled:"))


@pytest.mark.parametrize("hardware", ["cpu-local", "h100-sxm"])
def test_compiled_steps_are_predicted_faster(hardware: str) -> None:
    eager, compiled = planned("none", hardware), planned("regions", hardware)
    assert compiled.predicted.step_time_s < 0.97 * eager.predicted.step_time_s
    assert compiled.bound_s is not None
    assert compiled.bound_s <= compiled.predicted.step_time_s
    assert compiled.objective_s == pytest.approx(compiled.predicted.step_time_s, rel=1e-9)


def test_explain_says_what_compiling_buys() -> None:
    plan = planned("regions")
    eager = plan.bind(model(), loss_fn=squared)
    ms = [of.predicted.step_time_s * 1e3 for of in (plan, eager)]
    n_regions = plan.code()["stage_0.py"].count("@compiled")
    assert line(plan).startswith(
        f"compiled: {ms[0]:.3g} ms a step, eager {ms[1]:.3g} ms, {n_regions} regions a rank, "
    )
    assert line(plan).endswith(" steps save") and f"about {n_regions * 6.4:.3g} s" in line(plan)
    assert line(plan).removeprefix("compiled: ") in str(plan)
    assert "compiling" not in line(planned("regions", "h100-sxm"))
    assert not line(planned("none"))


def test_what_saves_nothing_takes_no_seconds() -> None:
    eager = planned("none").predicted
    text = str(compiling(eager, eager, 1, is_gpu=False))
    assert text.endswith(" ms, 1 region a rank")
    half = replace(eager, peak_bytes=eager.peak_bytes / 2)
    assert " ms, peak 1.2 MiB, eager 2.4 MiB, " in str(compiling(half, eager, 1, is_gpu=False))


def test_a_saved_plan_is_priced_as_it_runs(tmp_path: Path) -> None:
    plan = planned("regions")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    eager = loaded.bind(model(), loss_fn=squared)
    compiled = loaded.bind(model(), loss_fn=squared, compile="regions")
    assert compiled.predicted == plan.predicted
    assert eager.predicted.step_time_s > plan.predicted.step_time_s
    same = plan.what_if("device.launch_s=1x")
    assert same.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert line(same) == line(plan)
