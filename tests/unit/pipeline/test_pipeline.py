"""The lists of passes: they can run, the docstring matches, and every caller runs them."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

import autopar
from autopar import Manual, Plan
from autopar.passes import pipeline
from autopar.passes.compilation import PRINT_AFTER, check, size_of, text_of
from autopar.passes.pipeline import PASSES, evaluation, other_shapes
from tests.helpers.jobs import MlpWithLoss, machine, rows

# The search hands on its analysis, placements and prediction, so no pass makes them again.
OF_THE_SEARCH = ["capture", "read-inputs", "keep-whole", "open-search", "search", "record"]
OF_A_SAVED_PLAN = ["capture", "keep-whole", "analyse", "resolve-mesh", "place"]


def planned() -> Plan:
    torch.manual_seed(0)
    return autopar.plan(MlpWithLoss(), machine((1, 2)), rows(0, "x", "y"), manual=Manual(tp=2))


def ran(plan: Plan) -> list[str]:
    assert plan.bound is not None
    return [one.name for one in plan.bound.compilation.ran]


def test_the_lists_can_run() -> None:
    lists = evaluation(True), evaluation(False), other_shapes(1, False), other_shapes(2, True)
    for passes in (PASSES, *lists):
        check(passes)


def test_the_docstring_is_the_list() -> None:
    assert pipeline.__doc__ is not None
    told = [line.split() for line in pipeline.__doc__.splitlines() if "->" in line]
    assert [(words[0], words[-1]) for words in told] == [
        (one.name(), one.provides[0].__name__) for one in PASSES
    ]
    for words, one in zip(told, PASSES, strict=True):
        required = [kind.__name__ for kind in one.requires]
        listed = [word.strip(",") for word in words[1 : words.index("->")]]
        whole = [name for name in listed if name != "..."]
        assert set(whole) <= set(required)
        assert len(whole) == len(required) or listed[-1] == "..."


def test_planning_and_replay_run_the_same_list_from_different_points(tmp_path: Path) -> None:
    plan = planned()
    assert ran(plan) == OF_THE_SEARCH
    code = plan.code()
    assert ran(plan) == [*OF_THE_SEARCH, "lower", "verify", "differentiate", "emit"]
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").bind(MlpWithLoss())
    assert ran(again) == OF_A_SAVED_PLAN
    assert again.code() == code
    assert again.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=0.01)
    assert ran(again) == [*OF_A_SAVED_PLAN, "lower", "verify", "differentiate", "emit", "price"]


def test_a_plan_does_not_keep_the_model_or_the_batch() -> None:
    model, batch = MlpWithLoss(), rows(0, "x", "y")
    held = [weakref.ref(model), *(weakref.ref(value) for value in batch.values())]
    plan = autopar.plan(model, machine((1, 2)), batch, manual=Manual(tp=2))
    del model, batch
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert plan.code()


def test_every_fact_has_a_text_and_a_size(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").bind(MlpWithLoss())
    names = set[str]()
    for compiled in (plan, again):
        assert compiled.bound is not None
        _ = compiled.code(), compiled.predicted
        for one in compiled.bound.compilation.ran:
            names.add(one.name)
            for fact in one.made:
                assert text_of(fact)
                assert size_of(fact) != type(fact).__name__
    assert names == {one.name() for one in PASSES}


def test_printed_facts_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PRINT_AFTER, "record")
    plan = planned()
    text = capsys.readouterr().err.split("# PlanData after record\n")[1].split("\n# ")[0]
    assert json.loads(text) == json.loads(plan.data.to_json())
