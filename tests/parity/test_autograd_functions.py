"""`torch.autograd.Function`s on two ranks compute what the user's module does on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import autopar
from autopar.parity import Report
from autopar.runtime.launch import WorkerPool
from tests.helpers import functions
from tests.helpers.jobs import Batch, error, machine
from tests.helpers.nightly import nightly, one_in
from tests.parity.table import TOLERANCE

NAMES = tuple(f"/{function.__name__}#" for function in functions.RULES)
DATA = autopar.Manual(dp=2)


def register() -> None:
    for function, notation in functions.RULES.items():
        autopar.register_rule(function, notation)


def verified(of: str, **options: Any) -> Report:
    report = autopar.verify(
        functions.model(of), machine((1, 2)), functions.batch(), precision="fp64", **options
    )
    report.raise_if_wrong()
    assert report.tolerance == report.capture_tolerance == TOLERANCE
    return report


def placed(plan: autopar.Plan) -> list[str]:
    """The placements of the functions."""
    return [spec for key, spec in plan.data.operators.items() if key.startswith(NAMES)]


@one_in(3)
@pytest.mark.parametrize("of", functions.MODELS)
@pytest.mark.filterwarnings("ignore:.*kept whole")
def test_without_a_rule_a_function_is_whole_and_exact(of: str) -> None:
    report = verified(of)
    assert report.plan.bound is not None
    specs = placed(report.plan)
    assert specs and not any("S(" in spec for spec in specs)
    assert "register_rule" in report.plan.bound.analysis.program.audit.text(full=True)


@pytest.mark.parametrize("of", functions.MODELS)
@pytest.mark.usefixtures("registry")
def test_with_a_rule_it_is_sharded_and_exact(of: str) -> None:
    register()
    report = verified(of, manual=DATA, microbatches=2)
    specs = placed(report.plan)
    assert specs and all("S(0)" in spec for spec in specs)
    assert report.plan.data.microbatches == 2


def step(saved: str) -> tuple[dict[str, Tensor], list[str]]:
    """The job of one rank: one step by a saved plan, and the placements of the functions."""
    register()
    module = autopar.parallelize(
        functions.model("gated"), machine((1, 2)), plan=autopar.Plan.load(saved)
    )
    batch: Batch = functions.batch()
    loss = module.step(**batch)
    return {"loss": loss, **module.full_gradients()}, placed(module.plan)


@nightly
@pytest.mark.usefixtures("registry")
def test_a_saved_plan_finds_the_functions_in_other_processes(
    tmp_path: Path, workers: Callable[[int], WorkerPool]
) -> None:
    register()
    plan = autopar.plan(functions.model("gated"), machine((1, 2)), functions.batch(), manual=DATA)
    plan.save(tmp_path / "plan.json")
    found, specs = workers(2).run(step, str(tmp_path / "plan.json"))[0]
    right = functions.gradients(functions.model("gated"))
    assert {name: error(found[name], value) <= TOLERANCE for name, value in right.items()} == (
        dict.fromkeys(right, True)
    )
    assert all("S(0)" in spec for spec in specs)


def test_without_a_rule_there_is_a_warning_with_the_line_to_write() -> None:
    with pytest.warns(UserWarning, match="Function Reverse has no sharding rule") as all_:
        plan = autopar.plan(functions.model("reverse"), (1, 2), functions.batch())
    (warning,) = (w for w in all_ if "Reverse" in str(w.message))
    assert 'autopar.register_rule(Reverse, "a! b! -> a b")' in str(warning.message)
    assert plan.data.microbatches == 1
