"""Runs that go on compiled or not: the same losses, random numbers, checkpoints and replicas."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.parity import Report
from tests.helpers.jobs import gpt2, machine, tokens
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

DROPOUT: dict[str, Any] = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
N_STEPS = 2
# By day regions run as they are written; at night they are compiled.
both_ways = pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=nightly)], ids=["as written", "compiled"]
)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # in inductor


@pytest.fixture
def switch(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


class Run:
    """A GPT-2 with dropout in training on one process, in float64."""

    def __init__(self, compiling: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = gpt2(activation_function="gelu_new", **DROPOUT).double()
        self.pm = autopar.parallelize(model, 1, tokens(0), precision="fp64", compile=compiling)
        self.optimizer = torch.optim.AdamW(self.pm.parameters(), lr=1e-2)

    def train(self, first: int) -> list[float]:
        """The losses of `N_STEPS` steps on batches from `first` on."""
        losses = []
        for seed in range(first, first + N_STEPS):
            losses.append(self.pm.step(**tokens(seed)).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


@pytest.mark.usefixtures("switch")
@both_ways
def test_dropout_draws_the_same_numbers(is_compiled: bool) -> None:
    compiled, eager = Run("regions"), Run("none")
    assert "@compiled" in compiled.pm.code_path.read_text()
    assert "dropout" in compiled.pm.code_path.read_text()
    assert compiled.train(0) == pytest.approx(eager.train(0), abs=1e-10, rel=0)


@pytest.mark.usefixtures("switch")
@both_ways
@pytest.mark.parametrize(("saved", "loaded"), [("regions", "none"), ("none", "regions")])
def test_a_checkpoint_goes_from_one_to_the_other(
    saved: str, loaded: str, is_compiled: bool, tmp_path: Path
) -> None:
    run = Run(saved)
    run.train(0)
    autopar.save(run.pm, run.optimizer, tmp_path / "at 2", N_STEPS)
    wanted = run.train(N_STEPS)
    other = Run(loaded, seed=1)
    assert autopar.load(other.pm, other.optimizer, tmp_path / "at 2")[0] == N_STEPS
    assert other.train(N_STEPS) == pytest.approx(wanted, abs=1e-10, rel=0)
    values = run.pm.full_state_dict()
    for name, value in other.pm.full_state_dict().items():
        torch.testing.assert_close(value, values[name], atol=1e-10, rtol=0)


def layer_compiled(model: nn.Module) -> nn.Module:
    layers: Any = model.get_submodule("transformer.h")
    layers[1] = torch.compile(layers[1])
    return model


# How users compile what they give to `parallelize`, or what it returns.
HABITS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch.compile(model)": (torch.compile, lambda pm: pm),
    "torch.compile(layer)": (layer_compiled, lambda pm: pm),
    "torch.compile(pm)": (lambda model: model, torch.compile),
}


@pytest.mark.usefixtures("switch")
@both_ways
@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_compiled_models_stay(habit: str, is_compiled: bool) -> None:
    of_model, of_pm = HABITS[habit]
    torch.manual_seed(0)
    model = gpt2().double()
    plain = autopar.parallelize(copy.deepcopy(model), 1, tokens(0), precision="fp64")
    pm = autopar.parallelize(of_model(model), 1, tokens(0), precision="fp64", compile="regions")
    assert "@compiled" in pm.code_path.read_text()
    found = [of_pm(pm).step(**tokens(0)).item(), of_pm(pm.eval())(**tokens(0)).loss.item()]
    wanted = [plain.step(**tokens(0)).item(), plain.eval()(**tokens(0)).loss.item()]
    assert found == pytest.approx(wanted, abs=1e-10, rel=0)


def trained_replicas(is_compiled: bool) -> list[Any]:
    """One of two ranks that hold equal values: after two steps it compares them, bit for bit."""
    os.environ |= {} if is_compiled else {"TORCHDYNAMO_DISABLE": "1"}
    try:
        torch.manual_seed(0)
        model = gpt2(activation_function="gelu_new")
        pm = autopar.parallelize(
            model, machine((1, 2)), tokens(0), manual=Manual(dp=2), compile="regions"
        )
        optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
        losses = []
        for seed in range(N_STEPS):
            losses.append(pm.step(**tokens(seed)).item())
            optimizer.step()
            optimizer.zero_grad()
        pm.check_replicas()
        return losses
    finally:
        os.environ.pop("TORCHDYNAMO_DISABLE", None)


@both_ways
def test_parity_of_replicas(is_compiled: bool, workers: Pool) -> None:
    one, other = workers(2).run(trained_replicas, is_compiled)
    assert one == other
    assert one[0] != one[1]


def checked(compiling: str) -> Report:
    torch.manual_seed(0)
    return autopar.verify(
        gpt2().double(), (1, 2), tokens(0), manual=Manual(tp=2), precision="fp64",
        compile=compiling,
    )  # fmt: skip


def test_verify_compares_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    report = checked("regions")
    assert report.ok
    assert report.errors.keys() == report.uncompiled_errors.keys()
    assert "sharding, compiled: equal" in report.text()
    assert "sharding, not compiled: equal" in report.text()
    assert not checked("none").uncompiled_errors
