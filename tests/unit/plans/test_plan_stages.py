"""Plan files of several stages: saved plans run unchanged; hand edits run or are refused.

save, load, run        bitwise the loss and gradients of the original plan, on thread ranks
hand edits             change where stages begin, what crosses between them, and how;
                       legal ones run with parity, illegal ones are refused with the reason
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import Manual, Plan, PlanError
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

TINY, MESH = CASES["tiny"], machine((1, 4))
UP, UP_ADD, RELU = "up/linear#0", "up/add.Tensor#0", "/relu#0"
DOWN, DOWN_ADD = "down/linear#0", "down/add.Tensor#0"
Raw = dict[str, Any]
Edit = Callable[[Raw], Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "recipe": {"manual": Manual(pp=2, tp=2)},
    "equal stages": {"stages": 2, "schedule": "gpipe"},
    "given stages": {
        "stages": [("up", (1, 2)), ("down", (1, 2))], "mesh_shape": "as-given", "forbid": "data",
    },
    "unequal stages": {"stages": [("up", (1, 3)), ("down", (1, 1))]},
}  # fmt: skip


def make_plan(name: str) -> Plan:
    options = OPTIONS[name]
    return autopar.plan(
        TINY.model(), MESH, TINY.batch(0), precision="fp64", microbatches=2, **options
    )


@pytest.fixture(scope="module")
def given() -> Plan:
    """`up` on the first two ranks, `down` on the others; activations cross sharded by columns."""
    plan = make_plan("given stages")
    first, last = plan.data.stages
    assert (first.begins_at, last.begins_at) == (UP, DOWN)
    assert (dict(first.sent), dict(last.received)) == ({RELU: "I S(1)"}, {RELU: "I S(1)"})
    return plan


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
    plan = make_plan(name)
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
    plan = make_plan("unequal stages")
    plan.save(tmp_path / "plan.json")
    for read in (plan, Plan.load(tmp_path / "plan.json")):
        assert [stage.ranks for stage in read.stages] == [(0, 1, 2), (3,)]
        assert [stage.mesh_shape for stage in read.stages] == [(1, 3), (1, 1)]
        assert [stage.modules for stage in read.stages] == [("up",), ("down",)]
        assert list(read.placements) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert list(plan.code()) == ["stage_0.py", "stage_1.py"]


def stage(k: int, **values: Any) -> Edit:
    return lambda raw: raw["stages"][k].update(values)


def crosses(sent: str, received: str) -> Edit:
    def edit(raw: Raw) -> None:
        raw["stages"][0]["sent"], raw["stages"][1]["received"] = {RELU: sent}, {RELU: received}

    return edit


def relu_on_the_last_stage(raw: Raw) -> None:
    first, last = raw["stages"]
    last["begins_at"] = RELU
    last["operators"][RELU] = first["operators"].pop(RELU)
    first["sent"], last["received"] = {UP_ADD: "I S(1)"}, {UP_ADD: "I S(1)"}


def begin_later(raw: Raw) -> None:
    raw["stages"][0]["begins_at"] = UP_ADD


IN_ORDER = r"stages begin at operators \[{}\][\s\S]*the first begins at the first operator"
SENT = r"sent /relu#0: {} is not legal here[\s\S]*crosses S\(dim\), or R"
RECEIVED = r"received /relu#0: {} is not legal here[\s\S]*crosses S\(dim\), or P"

ILLEGAL: dict[str, tuple[Edit, str]] = {
    "begins at no operator": (
        stage(1, begins_at="side/mm#0"), r"begins at 'side/mm#0', which the captured graph does not"
    ),
    "begins where another does": (stage(1, begins_at=UP), IN_ORDER.format("0, 0")),
    "leaves out the first operator": (begin_later, IN_ORDER.format("1, 3")),
    "stages out of order": (lambda raw: raw["stages"].reverse(), IN_ORDER.format("3, 0")),
    "begins without its parameters": (
        stage(1, begins_at=DOWN_ADD), r"plan lacks: \['down\.weight'\]"
    ),
    "begins at a number": (stage(1, begins_at=3), r"stages\[1\]\.begins_at is 3; expected"),
    "a parameter of another stage": (
        lambda raw: raw["stages"][0]["parameters"].update({"down.bias": "I I"}),
        r"does not have: \['down\.bias'\]",
    ),
    "sent as copies of one work": (crosses("I I", "I S(1)"), SENT.format("I I")),
    "sent as parts of a sum": (crosses("I P", "I S(1)"), SENT.format("I P")),
    "sent cut by a dim that is not there": (crosses("I S(2)", "I P"), SENT.format(r"I S\(2\)")),
    "sent by too few axes": (crosses("S(1)", "I S(1)"), SENT.format(r"S\(1\)")),
    "sent cut on an axis of one rank": (
        crosses("S(0) S(1)", "I S(1)"), SENT.format(r"S\(0\) S\(1\)")
    ),
    "sent as nonsense": (crosses("I Q", "I S(1)"), r"sent /relu#0: 'Q' is not a placement"),
    "sent on two lines": (crosses("I\nR", "I S(1)"), r"sent\['/relu#0'\] is 'I\\nR'; expected"),
    "received by all": (crosses("I S(1)", "I R"), RECEIVED.format("I R")),
    "received as copies of one work": (crosses("I S(1)", "I I"), RECEIVED.format("I I")),
    "sends what nobody reads": (
        stage(0, sent={RELU: "I R", UP: "I R"}), r"nothing is sent under \['up/linear#0'\]"
    ),
    "receives what nobody sends": (
        stage(1, received={UP: "I S(1)"}), r"nothing is received under \['up/linear#0'\]"
    ),
    "a table that is none": (stage(0, sent=[UP]), r"stages\[0\]\.sent is a list of 1;"),
    "a table that is missing": (lambda raw: raw["stages"][1].pop("received"), r"'received'"),
    "a stage less": (lambda raw: raw["stages"].pop(), r"stages hold 2 ranks, the mesh has 4"),
    "too many ranks": (
        stage(1, axes={"dp": 2, "tp": 2}, mesh_shape=[1, 4]), r"stages hold 6 ranks, the mesh has 4"
    ),
    "ranks of another shape": (stage(1, mesh_shape=[2, 1]), r"mesh shape is \(2, 1\), .* \(1, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_edits_are_refused(name: str, given: Plan, tmp_path: Path) -> None:
    edit, reason = ILLEGAL[name]
    with pytest.raises(PlanError, match=reason):
        reread(given, tmp_path, edit)


LEGAL: dict[str, Edit] = {
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


@pytest.mark.parametrize("name", LEGAL)
def test_legal_edits_run_with_parity(name: str, given: Plan, tmp_path: Path) -> None:
    plan = reread(given, tmp_path, LEGAL[name])
    assert plan.data != given.data
    assert plan.bound is not None
    program, pipeline = plan.bound.analysis.program, plan.bound.pipeline
    errors, _ = pipeline_step(program, pipeline, TINY.batch(0), seed=0)
    assert {name: e for name, e in errors.items() if not e <= TOLERANCE} == {}


def test_modules_that_run_nothing_may_be_named() -> None:
    """Rotary tables are constants, so `rotary_emb` has no operators."""
    model, batch = tiny_llama(2), random_tokens(0)
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0"]
    rest = ["model.layers.1", "model.norm", "lm_head"]
    plan = autopar.plan(
        model, (1, 2), batch, stages=[(names, (1, 1)), (rest, (1, 1))], microbatches=4
    )
    assert "model.layers.0.mlp" in plan.stages[0].modules
    assert "lm_head" in plan.stages[1].modules
