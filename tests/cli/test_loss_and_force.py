"""`--loss package:fn` wherever a MODEL is taken, and `--force`: honoured or refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autopar.cli import app
from tests.helpers.commands import good, refused

Run = Callable[..., Result]

FACTORIES = """
import torch
from torch import nn


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return model, (torch.randn(8, 16),)


def squares(outputs, batch):
    return (outputs - batch[0]).square().mean()


class Loss:
    pass


number = 3
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "small.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda *args: CliRunner().invoke(app, list(args), prog_name="autopar")
    sys.modules.pop("small", None)


LOSS = ("--loss", "small:squares")
MESH = ("--mesh", "1x2", "--hardware", "cpu-local", "--json")


@pytest.mark.parametrize("command", ["plan", "passes", "explain", "code", "simulate", "verify"])
def test_commands_that_plan(run: Run, command: str) -> None:
    good(run(command, "small:mlp", *LOSS, *MESH))
    assert "returns no scalar loss" in refused(run(command, "small:mlp", *MESH))


def test_operators_of_the_loss(run: Run) -> None:
    found = {row["op"] for row in good(run("ops", "small:mlp", *LOSS, "--json"))["operators"]}
    assert "aten.pow.Tensor_Scalar" in found


def test_a_saved_plan_and_its_model(run: Run) -> None:
    good(run("plan", "small:mlp", *LOSS, *MESH, "-o", "plan.json"))
    again = ("--model", "small:mlp", *LOSS, "--json")
    for command in (("explain", "plan.json"), ("report", "plan.json"), ("simulate", "plan.json")):
        good(run(*command, *again))
    good(run("compare", "plan.json", "plan.json", *again))
    good(run("compare", "plan.json", "small:mlp", *again[:-1], *MESH))
    good(run("compare", "plan.json", "small:mlp", *LOSS, *MESH))
    message = refused(run("explain", "plan.json", *LOSS))
    assert "--loss small:squares is for a model, and plan.json is a plan" in message


WRONG = {
    "squares": "--loss squares names no function",
    "small:": "--loss small: names no function",
    "smaller:squares": "there is no module 'smaller' here or installed",
    "small:cubes": "module small has no function 'cubes'",
    "small:number": "module small has no function 'number'",
    "small:Loss": "--loss small:Loss is a class, not a function",
}


@pytest.mark.parametrize("name", WRONG)
def test_names_of_no_loss(run: Run, name: str) -> None:
    message = refused(run("plan", "small:mlp", "--loss", name, *MESH))
    assert WRONG[name] in message
    assert "fn(outputs, batch) returns a scalar" in message


def test_scaling_takes_no_loss(run: Run) -> None:
    Path("config.json").write_text(json.dumps({"model_type": "gpt2"}))
    message = refused(run("simulate", "config.json", "--scale", "--seq", "8", *LOSS))
    assert "--loss: --scale makes no plan" in message
