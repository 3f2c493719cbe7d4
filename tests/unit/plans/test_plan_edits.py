"""Hand edits of plan files: legal ones run with parity, illegal ones are refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import BatchError, Manual, MeshError, OptionError, Plan, PlanError
from tests.helpers.harness import generated_code, random_tokens, tiny_llama
from tests.helpers.jobs import CASES, machine
from tests.helpers.ranks import (
    TOLERANCE,
    Rank,
    gradient_of,
    named_inputs,
    pipeline_step,
    random_parameters,
    run_ranks,
)

__all__ = ["generated_code"]

TINY = CASES["tiny"]
UP, UP_ADD, RELU = "up/linear#0", "up/add.Tensor#0", "/relu#0"
DOWN, DOWN_ADD = "down/linear#0", "down/add.Tensor#0"
Raw = dict[str, Any]
Edit = Callable[[Raw], Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "one stage": {"manual": Manual(tp=2)},
    "recipe": {"manual": Manual(pp=2, tp=2)},
    "equal stages": {"stages": 2, "schedule": "gpipe"},
    "given stages": {
        "stages": [("up", (1, 2)), ("down", (1, 2))], "mesh_shape": "as-given", "forbid": "data",
    },
    "unequal stages": {"stages": [("up", (1, 3)), ("down", (1, 1))]},
}  # fmt: skip


@lru_cache
def planned(name: str) -> Plan:
    mesh = machine((1, 2) if name == "one stage" else (1, 4))
    return autopar.plan(
        TINY.model(), mesh, TINY.batch(0), precision="fp64", microbatches=2, **OPTIONS[name]
    )


def stepped(plan: Plan) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of one step, on every rank."""
    assert plan.bound is not None
    program = plan.bound.analysis.program
    inputs = named_inputs(program, TINY.batch(0))

    def work(rank: Rank) -> tuple[Tensor, dict[str, Tensor]]:
        loss = rank.executor.step(rank.stored, inputs)
        return loss, {name: gradient_of(p) for name, p in rank.stored.items()}

    return run_ranks(program, plan.bound.pipeline, random_parameters(program, 0), work)


def reread(plan: Plan, tmp_path: Path, edit: Edit = lambda raw: None) -> Plan:
    """Write the plan's JSON with an edit, load it, and bind it to the model."""
    raw = json.loads(plan.data.to_json())
    edit(raw)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(raw))
    return Plan.load(file).bind(TINY.model())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_plan_runs_bitwise_alike(name: str, tmp_path: Path) -> None:
    plan = planned(name)
    again = reread(plan, tmp_path)
    assert again.data == plan.data
    assert again.stages == plan.stages
    assert again.code() == plan.code()
    assert again.predicted == plan.predicted
    for (loss, gradients), (loss_again, found) in zip(stepped(plan), stepped(again), strict=True):
        assert torch.equal(loss, loss_again)
        assert gradients.keys() == found.keys()
        assert all(torch.equal(g, found[n]) for n, g in gradients.items())


def test_stages_of_a_plan(tmp_path: Path) -> None:
    """A loaded plan describes its stages even before it is bound to its model."""
    plan = planned("unequal stages")
    plan.save(tmp_path / "plan.json")
    for read in (plan, Plan.load(tmp_path / "plan.json")):
        assert [stage.ranks for stage in read.stages] == [(0, 1, 2), (3,)]
        assert [stage.mesh_shape for stage in read.stages] == [(1, 3), (1, 1)]
        assert [stage.modules for stage in read.stages] == [("up",), ("down",)]
        assert list(read.placements) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert list(plan.code()) == ["stage_0.py", "stage_1.py"]


def test_modules_that_run_nothing_may_be_named() -> None:
    """Rotary tables are constants, so `rotary_emb` has no operators."""
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    rest = ["model.layers.1", "model.norm", "lm_head"]
    stages = [(names, (1, 1)), (rest, (1, 1))]
    plan = autopar.plan(tiny_llama(2), (1, 2), random_tokens(0), stages=stages, microbatches=4)
    assert "model.layers.0.mlp" in plan.stages[0].modules
    assert "lm_head" in plan.stages[1].modules


def stage(k: int, **values: Any) -> Edit:
    return lambda raw: raw["stages"][k].update(values)


def operators(texts: Mapping[str, str]) -> Edit:
    return lambda raw: raw["stages"][0]["operators"].update(texts)


def parameters(texts: Mapping[str, str]) -> Edit:
    return lambda raw: raw["stages"][0]["parameters"].update(texts)


def lacking(table: str, key: str) -> Edit:
    return lambda raw: raw["stages"][0][table].pop(key)


def rows_that_do_not_divide(raw: Raw) -> None:
    raw["microbatches"] = 8  # of one row
    raw["stages"][0]["operators"][UP] = "I S(0), I R -> I S(0)"


def crosses(sent: str, received: str) -> Edit:
    def edit(raw: Raw) -> None:
        raw["stages"][0]["sent"], raw["stages"][1]["received"] = {RELU: sent}, {RELU: received}

    return edit


def relu_on_the_last_stage(raw: Raw) -> None:
    first, last = raw["stages"]
    last["begins_at"] = RELU
    last["operators"][RELU] = first["operators"].pop(RELU)
    first["sent"], last["received"] = {UP_ADD: "I S(1)"}, {UP_ADD: "I S(1)"}


IN_ORDER = r"stages begin at operators \[{}\][\s\S]*the first begins at the first operator"
SENT = r"sent /relu#0: {} is not legal here[\s\S]*crosses S\(dim\), or R"
RECEIVED = r"received /relu#0: {} is not legal here[\s\S]*crosses S\(dim\), or P"
MISSING, UNKNOWN = r"plan lacks: \['{}'\]", r"does not have: \['{}'\]"

# Of one stage, then of two.
ILLEGAL: dict[str, tuple[Edit, str]] = {
    "unknown operator": (operators({"up/mm#7": "I I -> I I"}), UNKNOWN.format("up/mm#7")),
    "missing operator": (lacking("operators", RELU), MISSING.format(RELU)),
    "unknown parameter": (parameters({"side.weight": "I I"}), UNKNOWN.format("side.weight")),
    "missing parameter": (lacking("parameters", "up.bias"), MISSING.format("up.bias")),
    "a dim that does not divide": (
        rows_that_do_not_divide, r"up/linear#0: I S\(0\) is not legal here"
    ),
    "P is no storage": (parameters({"up.bias": "I P"}), r"cannot be stored I P[\s\S]*I or S"),
    "R is no storage": (parameters({"up.bias": "I R"}), r"cannot be stored I R[\s\S]*I or S"),
    "I and S in one operator": (
        operators({UP: "I I, I S(0) -> I S(1)"}), r"Invariant never mixes[\s\S]*it may be",
    ),
    "no strategy of the rule": (
        operators({RELU: "I P -> I P"}), r"/relu#0: P -> P on axis 1[\s\S]*S\(0\) -> S\(0\)",
    ),
    "a dim that is not there": (operators({RELU: "I S(2) -> I S(2)"}), r"/relu#0: I S\(2\) is not"),
    "another number of tensors": (operators({RELU: "I R, I R -> I R"}), r"/relu#0 has 1 inputs"),
    "too few axes": (operators({RELU: "R -> R"}), r"/relu#0"),
    "no arrow": (operators({RELU: "I R"}), r"is not `inputs -> outputs`"),
    "not a placement": (operators({RELU: "I Q -> I Q"}), r"'Q' is not a placement"),
    "not a period": (parameters({"up.bias": "I S(0); each year"}), r"up.bias: 'year' is none of"),
    "fewer axes": (stage(0, axes={"tp": 2}), r"stored|axis|axes"),
    "another graph": (lambda raw: raw.update(graph_hash="0" * 16), r"was made for graph 0{16}"),
    "microbatches that do not divide": (lambda raw: raw.update(microbatches=3), r"3 microbatches"),
    "another part of the mesh": (
        stage(0, mesh_shape=[2, 1]), r"\(2, 1\), that of its ranks is"
    ),
}  # fmt: skip
ILLEGAL_STAGES: dict[str, tuple[Edit, str]] = {
    "begins at no operator": (
        stage(1, begins_at="side/mm#0"), r"begins at 'side/mm#0', which the captured graph does not"
    ),
    "begins where another does": (stage(1, begins_at=UP), IN_ORDER.format("0, 0")),
    "leaves out the first operator": (stage(0, begins_at=UP_ADD), IN_ORDER.format("1, 3")),
    "stages out of order": (lambda raw: raw["stages"].reverse(), IN_ORDER.format("3, 0")),
    "begins without its parameters": (stage(1, begins_at=DOWN_ADD), MISSING.format("down.weight")),
    "a parameter of another stage": (parameters({"down.bias": "I I"}), UNKNOWN.format("down.bias")),
    "sent as copies of one work": (crosses("I I", "I S(1)"), SENT.format("I I")),
    "sent as parts of a sum": (crosses("I P", "I S(1)"), SENT.format("I P")),
    "sent cut by a dim that is not there": (crosses("I S(2)", "I P"), SENT.format(r"I S\(2\)")),
    "sent by too few axes": (crosses("S(1)", "I S(1)"), SENT.format(r"S\(1\)")),
    "sent cut on an axis of one rank": (
        crosses("S(0) S(1)", "I S(1)"), SENT.format(r"S\(0\) S\(1\)")
    ),
    "sent as nonsense": (crosses("I Q", "I S(1)"), r"sent /relu#0: 'Q' is not a placement"),
    "received by all": (crosses("I S(1)", "I R"), RECEIVED.format("I R")),
    "received as copies of one work": (crosses("I S(1)", "I I"), RECEIVED.format("I I")),
    "sends what nobody reads": (
        stage(0, sent={RELU: "I R", UP: "I R"}), r"nothing is sent under \['up/linear#0'\]"
    ),
    "receives what nobody sends": (
        stage(1, received={UP: "I S(1)"}), r"nothing is received under \['up/linear#0'\]"
    ),
    "a stage less": (lambda raw: raw["stages"].pop(), r"stages hold 2 ranks, the mesh has 4"),
    "too many ranks": (
        stage(1, axes={"dp": 2, "tp": 2}, mesh_shape=[1, 4]), r"stages hold 6 ranks, the mesh has 4"
    ),
    "ranks of another shape": (stage(1, mesh_shape=[2, 1]), r"mesh shape is \(2, 1\), .* \(1, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ILLEGAL, *ILLEGAL_STAGES])
def test_illegal_edits_are_refused(name: str, tmp_path: Path) -> None:
    plan = planned("one stage" if name in ILLEGAL else "given stages")
    edit, reason = (ILLEGAL | ILLEGAL_STAGES)[name]
    with pytest.raises((PlanError, MeshError, BatchError, OptionError), match=reason):
        reread(plan, tmp_path, edit)


WHOLE_TAIL = {
    UP: "I R, I R -> I R",
    UP_ADD: "I R, I R -> I R",
    RELU: "I R -> I R",
    DOWN: "I I, I I -> I I",
    "/cross_entropy_loss#0": "I I, I R -> I I",
}
LEGAL: dict[str, Edit] = {
    "stored otherwise than used": parameters(
        {"up.weight": "I S(1)", "up.bias": "I I", "down.bias": "I S(0)"}
    ),
    "gathered at each use": parameters({"down.bias": "I S(0); each use"}),
    "replicated work": operators(WHOLE_TAIL),
    "a sum brought together by parts": operators(
        {DOWN_ADD: "I S(0), I R -> I S(0)", "/cross_entropy_loss#0": "I S(1), I R -> I I"}
    ),
}
LEGAL_STAGES: dict[str, Edit] = {
    "sent by one rank": crosses("I R", "I S(1)"),
    "received by one rank": crosses("I S(1)", "I P"),
    "sent and received by one rank": crosses("I R", "I P"),
    "cut by rows": crosses("I S(0)", "I S(0)"),
    "cut by rows, received by columns": crosses("I S(0)", "I S(1)"),
    "not said how": lambda raw: (stage(0, sent={})(raw), stage(1, received={})(raw)),
    "cut elsewhere": relu_on_the_last_stage,
    "another order of work": lambda raw: raw.update(schedule="gpipe"),
    "other microbatches": lambda raw: raw.update(microbatches=4),
    "fewer microbatches than stages": lambda raw: raw.update(microbatches=1),
    "other names of axes": stage(1, axes={"rows": 1, "columns": 2}),
}


@pytest.mark.parametrize("name", [*LEGAL, *LEGAL_STAGES])
def test_legal_edits_run_with_parity(name: str, tmp_path: Path) -> None:
    """Of the two stages, `up` is on the first two ranks; activations cross sharded by columns."""
    before = planned("one stage" if name in LEGAL else "given stages")
    plan = reread(before, tmp_path, (LEGAL | LEGAL_STAGES)[name])
    assert plan.data != before.data
    assert plan.bound is not None
    program, pipeline = plan.bound.analysis.program, plan.bound.pipeline
    errors, _ = pipeline_step(program, pipeline, TINY.batch(0), seed=0)
    assert {name: e for name, e in errors.items() if not e <= TOLERANCE} == {}
