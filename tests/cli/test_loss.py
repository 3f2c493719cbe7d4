"""`--loss package:fn` wherever a MODEL is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.factories import Run, run
from tests.helpers.commands import good, refused

__all__ = ["run"]

LOSS = ("--loss", "tiny:squares")
MESH = ("--mesh", "1x2", "--hardware", "cpu-local", "--json")


@pytest.mark.parametrize("command", ["plan", "passes", "explain", "code", "simulate", "verify"])
def test_commands_that_plan(run: Run, command: str) -> None:
    good(run(command, "tiny:predictor", *LOSS, *MESH))
    assert "returns no scalar loss" in refused(run(command, "tiny:predictor", *MESH))


def test_operators_of_the_loss(run: Run) -> None:
    found = {row["op"] for row in good(run("ops", "tiny:predictor", *LOSS, "--json"))["operators"]}
    assert "aten.pow.Tensor_Scalar" in found


def test_a_saved_plan_and_its_model(run: Run) -> None:
    good(run("plan", "tiny:predictor", *LOSS, *MESH, "-o", "plan.json"))
    again = ("--model", "tiny:predictor", *LOSS, "--json")
    for command, *flags in (("explain",), ("report", "--no-replan"), ("simulate",)):
        good(run(command, "plan.json", *flags, *again))
    good(run("compare", "plan.json", "plan.json", *again))
    good(run("compare", "plan.json", "tiny:predictor", *again[:-1], *MESH))
    good(run("compare", "plan.json", "tiny:predictor", *LOSS, *MESH))
    message = refused(run("explain", "plan.json", *LOSS))
    assert "--loss tiny:squares is for a model, and plan.json is a plan" in message


WRONG = {
    "squares": "--loss squares names no function",
    "tiny:": "--loss tiny: names no function",
    "smaller:squares": "there is no module 'smaller' here or installed",
    "tiny:cubes": "module tiny has no function 'cubes'",
    "tiny:number": "module tiny has no function 'number'",
    "tiny:Loss": "--loss tiny:Loss is a class, not a function",
}


@pytest.mark.parametrize("name", WRONG)
def test_names_of_no_loss(run: Run, name: str) -> None:
    message = refused(run("plan", "tiny:predictor", "--loss", name, *MESH))
    assert WRONG[name] in message
    assert "fn(outputs, batch) returns a scalar" in message


def test_scaling_takes_no_loss(run: Run) -> None:
    Path("config.json").write_text(json.dumps({"model_type": "gpt2"}))
    message = refused(run("simulate", "config.json", "--scale", "--seq", "8", *LOSS))
    assert "--loss: --scale makes no plan" in message
