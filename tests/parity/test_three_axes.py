"""Stages of three axes: rows, sequences and weights are split at once, as one process computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.parity import Report
from tests.helpers.jobs import gpt2, llama, machine, tokens
from tests.helpers.nightly import nightly

MODELS: dict[str, Callable[[int], nn.Module]] = {"llama": llama, "gpt2": gpt2}
N_ROWS = 2


def verified(model: str, shape: tuple[int, ...], n_layers: int = 1, **options: Any) -> Report:
    """Of few rows, so that one axis at most can split them."""
    torch.manual_seed(0)
    report = autopar.verify(
        MODELS[model](n_layers), machine(shape), tokens(0, N_ROWS), precision="fp64",
        microbatches=1, **options,
    )  # fmt: skip
    assert report.ok and report.tolerance <= 1e-10, report.text()
    return report


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt2", (1, 2, 2)),
        pytest.param("gpt2", (2, 2, 1), marks=nightly),
        pytest.param("gpt2", (2, 2, 2), marks=nightly),
        pytest.param("llama", (1, 2, 2), marks=nightly),
        pytest.param("llama", (2, 2, 2), marks=nightly),
    ],
)
def test_a_step_is_that_of_one_process(model: str, sizes: tuple[int, int, int]) -> None:
    dp, cp, tp = sizes
    degrees = {"dp": dp, "cp": cp, "tp": tp}
    report = verified(model, (1, dp * cp * tp), stages=1, mesh_shape=degrees)
    (stage,) = report.plan.stages
    assert stage.axes == degrees
    used = [call.axis for call in report.plan.collectives()]
    names = {n for axis in used for n in (axis if isinstance(axis, tuple) else (axis,))}
    assert names == {name for name, size in stage.axes.items() if size > 1}, "an axis is idle"


@nightly
def test_the_axes_of_a_mesh_of_three_dims() -> None:
    report = verified("llama", (2, 2, 2), stages=1, mesh_shape="as-given")
    (stage,) = report.plan.stages
    assert stage.axes == {"pod": 2, "node": 2, "device": 2}
    assert stage.mesh_shape == (4, 2)


@pytest.mark.parametrize(
    ("model", "manual"),
    [
        ("gpt2", Manual(cp=2)),
        *(
            pytest.param(*of, marks=nightly)
            for of in (
                ("llama", Manual(cp=4, zero=1)),
                ("llama", Manual(cp=2, tp=2, sp=True)),
                ("gpt2", Manual(dp=2, cp=2, zero=3)),
                ("llama", Manual(pp=2, cp=2, zero=1)),
                ("gpt2", Manual(dp=2, cp=2, tp=2, sp=True, zero=1)),
            )
        ),
    ],
)
def test_the_recipe_cuts_sequences(model: str, manual: Manual) -> None:
    """Keys and values of each layer go round a ring, or are gathered: what costs less."""
    report = verified(model, (1, manual.n_ranks), manual.pp, manual=manual)
    plan = report.plan
    assert all(stage.axes["cp"] == manual.cp for stage in plan.stages)
    calls = [call for call in plan.collectives() if call.axis == "cp"]
    counts = Counter[str]()
    for call in calls:
        counts[call.kind] += call.count if call.phase == "forward" else 0
    wanted = {"send_recv": manual.pp * (manual.cp - 1)}, {"all_gather": 2 * manual.pp}
    assert {kind: n for kind, n in counts.items() if n and kind != "all_reduce"} in wanted
    for name, of_operators in plan.uses.items():
        assert all(not use[1].startswith("S") for use in of_operators.values()), (
            name,
            of_operators,
        )
    assert any(of[1].startswith("S") for of in plan.placements.values()) == (manual.zero > 0)
