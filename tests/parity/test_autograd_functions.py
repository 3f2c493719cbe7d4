"""`torch.autograd.Function`s on two ranks train what one process trains by the user's module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import autopar
from autopar.runtime.launch import WorkerPool
from tests.helpers import functions
from tests.helpers.jobs import Batch, error, machine
from tests.parity.table import TOLERANCE

NAMES = tuple(f"/{function.__name__}#" for function in functions.RULES)


class Stepped(NamedTuple):
    """`placed`: the placements of the functions; `audit`: what capture notes of them."""

    gradients: dict[str, Tensor]
    microbatches: int
    placed: tuple[str, ...]
    audit: str


def step(of: str, has_rule: bool, saved: str | None, options: dict[str, Any]) -> Stepped:
    """The job of one rank: one step."""
    if has_rule:
        register()
    plan = autopar.Plan.load(saved) if saved else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*kept whole")
        module = autopar.parallelize(
            functions.model(of), machine((1, 2)), None if saved else functions.batch(), plan=plan,
            **options,
        )  # fmt: skip
    batch: Batch = functions.batch()
    loss = module.step(**batch)
    data = module.plan.data
    return Stepped(
        {"loss": loss, **module.full_gradients()},
        data.microbatches,
        tuple(spec for key, spec in data.operators.items() if key.startswith(NAMES)),
        module.captured().text(full=True),
    )


def register() -> None:
    for function, notation in functions.RULES.items():
        autopar.register_rule(function, notation)


def wrong(found: list[Stepped], of: str) -> dict[str, float]:
    right = functions.gradients(functions.model(of))
    off = {name: error(found[0].gradients[name], value) for name, value in right.items()}
    return {name: value for name, value in off.items() if not value <= TOLERANCE}


@pytest.mark.parametrize("of", functions.MODELS)
def test_without_a_rule_a_function_is_whole_and_exact(
    of: str, workers: Callable[[int], WorkerPool]
) -> None:
    found = workers(2).run(step, of, False, None, {})
    assert wrong(found, of) == {}
    assert found[0].placed and not any("S(" in spec for spec in found[0].placed)
    assert "register_rule" in found[0].audit


@pytest.mark.parametrize("of", functions.MODELS)
def test_with_a_rule_it_is_sharded_and_exact(of: str, workers: Callable[[int], WorkerPool]) -> None:
    options = {"manual": autopar.Manual(dp=2), "microbatches": 2}
    found = workers(2).run(step, of, True, None, options)
    assert wrong(found, of) == {}
    assert found[0].placed and all("S(0)" in spec for spec in found[0].placed)
    assert found[0].microbatches == 2


@pytest.mark.usefixtures("registry")
def test_a_saved_plan_finds_the_functions_in_other_processes(
    tmp_path: Path, workers: Callable[[int], WorkerPool]
) -> None:
    register()
    manual = autopar.Manual(dp=2)
    made = autopar.plan(functions.model("gated"), machine((1, 2)), functions.batch(), manual=manual)
    made.save(tmp_path / "plan.json")
    found = workers(2).run(step, "gated", True, str(tmp_path / "plan.json"), {})
    assert wrong(found, "gated") == {}
    assert all("S(0)" in spec for spec in found[0].placed)


def test_without_a_rule_there_is_a_warning_with_the_line_to_write() -> None:
    with pytest.warns(UserWarning, match="Function Reverse has no sharding rule") as all_:
        plan = autopar.plan(functions.model("reverse"), (1, 2), functions.batch())
    (warning,) = (w for w in all_ if "Reverse" in str(w.message))
    assert 'autopar.register_rule(Reverse, "... -> ...")' in str(warning.message)
    assert plan.data.microbatches == 1
