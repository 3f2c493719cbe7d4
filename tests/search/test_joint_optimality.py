"""The planner's choice against every plan there is: cuts, submeshes, views, microbatches.

Every plan is solved and simulated (`tests/helpers/every_plan.py`). The planner simulates few of
them. By that it loses at most `REGRET`, and nothing where one stage is best.

`AUTOPAR_OPTIMALITY=1` adds every number of microbatches, and a GPT-2 on four and eight devices:
three minutes.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

import autopar
from autopar import Device, Link, Manual, Mesh
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from tests.helpers.captures import captured
from tests.helpers.every_plan import Choices
from tests.helpers.harness import Mlp, random_tokens, tiny_gpt2

# By simulation: the share that the closed form may lose.
REGRET = 0.01
REL = 1e-9
WHOLE = os.environ.get("AUTOPAR_OPTIMALITY")
# Seconds per byte between nodes, and inside; products take about as long as messages.
SLOW, TIERED, FAST = (1e-8, 1e-8), (1e-8, 1e-10), (1e-9, 1e-10)
MODELS = {"mlp": lambda: Mlp(width=256, n_layers=4), "gpt2": lambda: tiny_gpt2(2)}


def batch_of(model: str) -> dict[str, torch.Tensor]:
    if model == "gpt2":
        return random_tokens(0)
    return {name: torch.zeros(64, 256, dtype=torch.float64) for name in ("x", "y")}


@cache
def analysis_of(model: str) -> Analysis:
    torch.manual_seed(0)
    return Analysis.of(captured(MODELS[model](), batch_of(model), precision="fp64"))


def machine(model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float]) -> Mesh:
    """Slower for the MLP, whose products are larger."""
    links = [Link(5e-6, s_per_byte[0]), Link(1e-6, s_per_byte[1])]
    flops_per_s = 1e10 if model == "mlp" else 1e9
    device = Device(flops_per_s, 1e12, 1e12, 1e-7)
    return Mesh(shape, links=links[-len(shape) :], device=device)


Case = tuple[str, tuple[int, ...], tuple[float, float], int | None]
FEW: list[Case] = [
    ("mlp", (4,), SLOW, None),
    ("mlp", (2, 2), TIERED, 16),
    # What crosses into a part of a node; stages that place what crosses as the whole would not.
    ("mlp", (2, 4), TIERED, 16),
    ("mlp", (2, 4), SLOW, 16),
    ("gpt2", (2,), SLOW, 4),
]
MANY: list[Case] = [
    ("gpt2", (2,), SLOW, None),
    ("mlp", (2, 2), SLOW, None),
    *(("mlp", shape, speed, None) for shape in ((4,), (2, 2)) for speed in (TIERED, FAST)),
    *(("mlp", (2, 4), speed, None) for speed in (SLOW, TIERED, FAST)),
    *(("gpt2", (2, 2), speed, 4) for speed in (SLOW, TIERED, FAST)),
    ("gpt2", (2, 2), TIERED, None),
]


@pytest.mark.parametrize(
    ("model", "shape", "s_per_byte", "microbatches"), [*FEW, *(MANY if WHOLE else [])]
)
def test_no_plan_is_faster_by_more_than_the_bound(
    model: str,
    shape: tuple[int, ...],
    s_per_byte: tuple[float, float],
    microbatches: int | None,
) -> None:
    check(model, shape, s_per_byte, microbatches)


def check(
    model: str, shape: tuple[int, ...], s_per_byte: tuple[float, float], microbatches: int | None
) -> None:
    options = Options.of(microbatches=microbatches or "auto")
    choices = Choices(analysis_of(model), machine(model, shape, s_per_byte), options)
    found = choices.step_times_s()
    best = min(found, key=found.__getitem__)
    assert len(found) >= 6, "too little to choose from"
    solved = choices.planned().solved
    lost = solved.step_time_s / found[best] - 1
    assert lost <= REGRET, f"{solved.candidate.name} {solved.candidate.ends} loses to {best}"
    if " | " not in best:
        assert lost <= REL, f"{solved.candidate.name} loses to {best}"


def test_no_recipe_with_stages_is_predicted_faster() -> None:
    mesh, batch = machine("mlp", (2, 4), TIERED), batch_of("mlp")
    model, precision = MODELS["mlp"](), "fp64"
    plan = autopar.plan(model, mesh, batch, precision=precision)
    recipe = autopar.plan(
        model, mesh, batch, precision=precision, manual=Manual(dp=2, tp=2, pp=2), microbatches=8
    )
    assert plan.predicted.step_time_s <= recipe.predicted.step_time_s * (1 + REL)
