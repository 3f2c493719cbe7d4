"""The types of options: all options, and those of no other name, for editors and type checkers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.options import Options
from autopar.planning import PlanOptions
from tests.helpers.nightly import nightly

ROOT = Path(__file__).parents[3]
SNIPPET = """
import torch
from torch import nn

import autopar

model, batch = nn.Linear(8, 8), {"input": torch.zeros(4, 8)}
mesh = autopar.Mesh((1, 4), hardware="h100-sxm")
plan = autopar.plan(
    model, mesh, batch, precision="bf16-mixed", memory_limit="40GiB", time_limit_s=None,
    manual=autopar.Manual(dp=4), forbid=["zero3"], loss_fn=lambda outputs, batch: outputs.sum(),
)
module = autopar.parallelize(model, (1, 4), batch, stages=[("0", (1, 2)), (["1"], 2)], tie=0.1)
report = autopar.verify(model, 4, batch, mesh_shape={"tp": 2}, force={"weight": "S(0)@1"})
print(plan.predicted.step_time_s, module.plan, report.ok)
"""
WRONG = {
    "autopar.plan(model, mesh, batch, memory_limits=1)": 'Unexpected keyword argument "memory_l',
    "autopar.parallelize(model, mesh, batch, hardware=1)": 'Unexpected keyword argument "hardware"',
    "autopar.verify(model, mesh, batch, tie='2%')": '"tie" to "verify" has incompatible type "str"',
    "autopar.plan(model, mesh, batch, manual={'dp': 4})": '"manual" to "plan" has incompatible',
    "autopar.plan(model, object(), batch)": 'Argument 2 to "plan" has incompatible type',
}


@pytest.mark.parametrize(
    "function", [autopar.plan, autopar.parallelize, autopar.verify, autopar.resilient]
)
def test_every_option_is_typed(function: Callable[..., Any]) -> None:
    assert set(PlanOptions.__annotations__) == {option.name for option in fields(Options)}
    (options,) = (
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD
    )
    assert options.annotation == "Unpack[PlanOptions]"


@nightly
def test_mypy_sees_the_options(tmp_path: Path) -> None:
    lines = [*SNIPPET.splitlines(), *WRONG]
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(tmp_path),
        "script.py",
    ]  # fmt: skip
    # As site-packages has it: errors inside of the package are not the user's.
    environment = {"PATH": "", "MYPYPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("script.py")]
    errors = [line for line in said if ": error:" in line]
    for number, (statement, message) in enumerate(WRONG.items(), len(SNIPPET.splitlines()) + 1):
        (error,) = (line for line in errors if line.startswith(f"script.py:{number}:"))
        assert message in error, statement
    assert len(errors) == len(WRONG), done.stdout
