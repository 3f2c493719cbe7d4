"""Stages of three axes: rows, sequences and weights are split at once, as one process computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.parity import Report
from tests.helpers.jobs import gpt2, llama, machine, tokens
from tests.helpers.nightly import nightly

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: llama(1), "gpt2": lambda: gpt2(1)}
N_ROWS = 2


def verified(model: str, shape: tuple[int, ...], **degrees: int) -> Report:
    """Of few rows, so that one axis at most can split them."""
    torch.manual_seed(0)
    report = autopar.verify(
        MODELS[model](), machine(shape), tokens(0, N_ROWS), precision="fp64", stages=1,
        microbatches=1, mesh_shape=degrees or "as-given",
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
    report = verified(model, (1, dp * cp * tp), dp=dp, cp=cp, tp=tp)
    (stage,) = report.plan.stages
    assert stage.axes == {"dp": dp, "cp": cp, "tp": tp}
    used = [call.axis for call in report.plan.collectives()]
    names = {n for axis in used for n in (axis if isinstance(axis, tuple) else (axis,))}
    assert names == {name for name, size in stage.axes.items() if size > 1}, "an axis is idle"


@nightly
def test_the_axes_of_a_mesh_of_three_dims() -> None:
    report = verified("llama", (2, 2, 2))
    (stage,) = report.plan.stages
    assert stage.axes == {"pod": 2, "node": 2, "device": 2}
    assert stage.mesh_shape == (4, 2)
