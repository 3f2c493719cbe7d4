"""Plan files: saved plans run unchanged; legal hand edits run, illegal ones are refused.

save, load, run        bitwise the losses of the run that made the plan
generated code         the same text from the plan, planned again, loaded, and in another process
golden files           a whole program and a whole plan of `tests/helpers/models/tiny_model.py`
hand edits             legal ones run with parity; illegal ones are refused with the reason
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import BatchError, CaptureError, MeshError, OptionError, Plan, PlanError
from autopar.cost.hardware import resolve
from autopar.mesh import Device, Link, Mesh
from autopar.passes.binding import mesh_of, record_of
from autopar.plans import parse_plan
from autopar.runtime.launch import WorkerPool
from tests.conftest import Golden
from tests.helpers.jobs import (
    CASES,
    AnyCell,
    Cell,
    errors,
    gpt2,
    machine,
    reference,
    train,
    train_planned,
)
from tests.helpers.models.tiny_model import Tiny
from tests.helpers.pipeline_jobs import PipelineCell
from tests.parity.table import TOLERANCE

TINY = Cell("tiny", (1, 2), "megatron", 2)
Pool = Callable[[int], WorkerPool]


def make_plan(cell: AnyCell) -> Plan:
    case = cell.case
    return autopar.plan(case.model(), machine(cell.shape), case.batch(0), **cell.options())


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return make_plan(TINY)


@pytest.mark.parametrize(
    "cell",
    [
        TINY,
        Cell("mlp", (1, 2), "zero-3", 4),
        PipelineCell("gpt2", "no data", "1f1b", 4),
    ],
    ids=str,
)
def test_a_saved_plan_runs_bitwise_alike(cell: AnyCell, tmp_path: Path, workers: Pool) -> None:
    """One run plans in the job; the other loads a plan file that was made outside it."""
    plan = make_plan(cell)
    plan.save(tmp_path / "plan.json")
    planned = workers(cell.n_ranks).run(train, cell)
    loaded = workers(cell.n_ranks).run(train_planned, cell, str(tmp_path / "plan.json"))
    for first, (second, code) in zip(planned, loaded, strict=True):
        assert first.losses == second.losses
        assert first.values.keys() == second.values.keys()
        assert all(torch.equal(v, second.values[n]) for n, v in first.values.items())
        assert code == plan.code()


def test_a_file_is_read_back_whole(tiny: Plan, tmp_path: Path) -> None:
    tiny.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.data == tiny.data
    assert loaded.placements == tiny.placements
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_switch_that_sums_is_read_back(tiny: Plan) -> None:
    links = [Link(1e-5, 1e-9), Link(1e-6, 1e-11, 1.2e-11)]
    mesh = Mesh((2, 1), links=links, device=Device(1e12, 1e11, 1e9))
    data = replace(tiny.data, mesh=record_of(mesh, resolve(mesh)))
    assert mesh_of(parse_plan(data.to_json()).mesh) == mesh


def test_an_unbound_plan_says_what_it_lacks(tiny: Plan, tmp_path: Path) -> None:
    tiny.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for ask in (loaded.code, loaded.collectives, lambda: loaded.predicted, lambda: loaded.uses):
        with pytest.raises(PlanError, match=r"only loaded[\s\S]*plan\.bind\(model\)"):
            ask()


def test_binding_computes_the_costs_anew(tiny: Plan, tmp_path: Path) -> None:
    tiny.save(tmp_path / "plan.json")
    bound = Plan.load(tmp_path / "plan.json").bind(CASES["tiny"].model())
    assert bound.code() == tiny.code() == make_plan(TINY).code()
    assert bound.collectives() == tiny.collectives()
    assert bound.predicted == tiny.predicted
    assert bound.uses == tiny.uses


def test_golden_program(tiny: Plan, golden: Golden) -> None:
    ((name, source),) = tiny.code().items()
    assert name == "stage_0.py"
    golden("tiny_stage_0.txt", source)


def test_golden_plan(tiny: Plan, golden: Golden) -> None:
    golden("tiny_plan.json", tiny.data.to_json())


@pytest.mark.parametrize("cell", [TINY, Cell("gpt2", (1, 2), "sequence", 1)], ids=str)
def test_no_path_of_this_machine_is_written(cell: Cell) -> None:
    plan = make_plan(cell)
    for text in (plan.data.to_json(), *plan.code().values()):
        assert not re.search(r"(?<![\w/.-])(/[\w.-]+){2,}/[\w.-]+\.py", text)
        assert str(Path(__file__).parents[3]) not in text
        assert str(Path(torch.__file__).parents[1]) not in text


Raw = dict[str, Any]
UP, RELU, DOWN_ADD = "up/linear#0", "/relu#0", "down/add.Tensor#0"


def operator(key: str, text: str) -> Callable[[Raw], None]:
    return lambda raw: raw["stages"][0]["operators"].update({key: text})


def parameter(name: str, text: str) -> Callable[[Raw], None]:
    return lambda raw: raw["stages"][0]["parameters"].update({name: text})


def axes(**sizes: int) -> Callable[[Raw], None]:
    return lambda raw: raw["stages"][0].update(axes=sizes)


ILLEGAL: dict[str, tuple[Callable[[Raw], None], str]] = {
    "unknown operator": (operator("up/mm#7", "I I -> I I"), r"does not have: \['up/mm#7'\]"),
    "missing operator": (
        lambda raw: raw["stages"][0]["operators"].pop(RELU), r"plan lacks: \['/relu#0'\]"),
    "unknown parameter": (parameter("side.weight", "I I"), r"does not have: \['side.weight'\]"),
    "missing parameter": (
        lambda raw: raw["stages"][0]["parameters"].pop("up.bias"), r"plan lacks: \['up.bias'\]",
    ),
    "a dim that does not divide": (
        lambda raw: raw.update(microbatches=8)  # microbatches of one row
        or raw["stages"][0]["operators"].update({UP: "I S(0), I R -> I S(0)"}),
        r"up/linear#0: I S\(0\) is not legal here",
    ),
    "P is no storage": (parameter("up.bias", "I P"), r"up.bias cannot be stored I P[\s\S]*I or S"),
    "R is no storage": (parameter("up.bias", "I R"), r"up.bias cannot be stored I R[\s\S]*I or S"),
    "I and S in one operator": (
        operator(UP, "I I, I S(0) -> I S(1)"), r"Invariant never mixes[\s\S]*it may be",
    ),
    "no strategy of the rule": (
        operator(RELU, "I P -> I P"), r"operator /relu#0: P -> P on axis 1[\s\S]*S\(0\) -> S\(0\)",
    ),
    "a dim that is not there": (operator(RELU, "I S(2) -> I S(2)"), r"/relu#0: I S\(2\) is not"),
    "another number of tensors": (operator(RELU, "I R, I R -> I R"), r"/relu#0 has 1 inputs"),
    "too few axes": (operator(RELU, "R -> R"), r"/relu#0"),
    "no arrow": (operator(RELU, "I R"), r"is not `inputs -> outputs`"),
    "not a placement": (operator(RELU, "I Q -> I Q"), r"'Q' is not a placement"),
    "not a period": (parameter("up.bias", "I S(0); each year"), r"up.bias: 'year' is none of"),
    "a newline in a name": (operator("/relu#0\nimport os", "I R -> I R"), r"one line of text"),
    "a newline in a text": (operator(RELU, "I R ->\nI R"), r"one line of text"),
    "a newline in the model": (lambda raw: raw.update(model="A\nB"), r"model is .*; expected one"),
    "an axis that is no name": (
        lambda raw: raw["stages"][0].update(axes={"dp": 1, "t p": 2}), r"axes is 't p'",
    ),
    "more ranks than the mesh": (
        axes(dp=2, tp=2), r"stages\[0\]\.axes hold 4 ranks, stages\[0\]\.mesh_shape has 2"
    ),
    "fewer axes": (axes(tp=2), r"stored|axis|axes"),
    "another graph": (lambda raw: raw.update(graph_hash="0" * 16), r"was made for graph 0{16}"),
    "microbatches that do not divide": (lambda raw: raw.update(microbatches=3), r"3 microbatches"),
    "no microbatch": (lambda raw: raw.update(microbatches=0), r"microbatches is 0; exp"),
    "another version": (lambda raw: raw.update(version=99), r"version 99"),
    "an unknown key": (lambda raw: raw.update(code="import os"), r"unknown keys \['code'\]"),
    "a key that is missing": (lambda raw: raw.pop("stages"), r"missing keys \['stages'\]"),
    "a key that a stage lacks": (lambda raw: raw["stages"][0].pop("operators"), r"'operators'"),
    "an unknown key of a stage": (lambda raw: raw["stages"][0].update(code="x"), r"'code'"),
    "a table that is none": (lambda raw: raw["stages"][0].update(operators=[1]), r"is a list of 1"),
    "no stage": (lambda raw: raw["stages"].clear(), r"stages is a list of 0; expected"),
    "stages that are none": (lambda raw: raw.update(stages=[1]), r"stages\[0\] is 1; expected"),
    "another schedule": (lambda raw: raw.update(schedule="2f2b"), r"'2f2b'; expected one of 1f1b"),
    "another part of the mesh": (
        lambda raw: raw["stages"][0].update(mesh_shape=[2, 1]), r"\(2, 1\), that of its ranks is",
    ),
    "an input of no dtype": (
        lambda raw: raw["inputs"][0].update(dtype="os.system"), r"os\.system",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_edits_are_refused(name: str, tiny: Plan, tmp_path: Path) -> None:
    edit, reason = ILLEGAL[name]
    raw = json.loads(tiny.data.to_json())
    edit(raw)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(autopar.AutoparError, match=reason) as refusal:
        Plan.load(file).bind(CASES["tiny"].model())
    assert isinstance(refusal.value, (PlanError, MeshError, BatchError, OptionError))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}', "\x00"])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read .*plan\.json: No such file"):
        Plan.load(tmp_path / "plan.json")


def test_another_model_is_refused(tiny: Plan) -> None:
    wider = Tiny()
    wider.up, wider.down = nn.Linear(8, 32), nn.Linear(32, 4)
    with pytest.raises(PlanError, match=r"made for graph \w+ of Tiny, this model gives"):
        tiny.bind(wider)
    with pytest.raises(CaptureError, match="cannot trace GPT2LMHeadModel"):
        tiny.bind(gpt2())


def test_another_mesh_shape_is_refused(tiny: Plan) -> None:
    for shape in ((1, 4), (2, 1)):
        with pytest.raises((PlanError, MeshError), match="mesh"):
            tiny.bind(CASES["tiny"].model(), machine(shape))


def test_other_hardware_of_the_same_shape_is_warned_of() -> None:
    case = CASES["tiny"]
    plan = autopar.plan(case.model(), autopar.Mesh((1, 2), hardware="a100-80gb"), case.batch(0))
    with pytest.warns(UserWarning, match="made for a100-80gb; it runs on cpu-local"):
        bound = plan.bind(case.model(), autopar.Mesh((1, 2), hardware="cpu-local"))
    assert bound.data == plan.data
    assert bound.predicted.step_time_s != plan.predicted.step_time_s


def test_options_beside_a_plan_are_refused(tiny: Plan) -> None:
    """The plan has decided these options; ignoring them silently would mislead."""
    for option, text in ({"microbatches": 4}, "microbatches=4"), ({"precision": "model"}, "prec"):
        with pytest.raises(OptionError, match=f"{text}[\\s\\S]*plan again"):
            autopar.parallelize(CASES["tiny"].model(), machine((1, 2)), plan=tiny, **option)


WHOLE_TAIL = {
    UP: "I R, I R -> I R",
    "up/add.Tensor#0": "I R, I R -> I R",
    RELU: "I R -> I R",
    "down/linear#0": "I I, I I -> I I",
    "/cross_entropy_loss#0": "I I, I R -> I I",
}
LEGAL: dict[str, Callable[[Raw], Any]] = {
    "stored otherwise than used": lambda raw: raw["stages"][0]["parameters"].update(
        {"up.weight": "I S(1)", "up.bias": "I I", "down.bias": "I S(0)"}
    ),
    "gathered at each use": lambda raw: raw["stages"][0]["parameters"].update(
        {"down.bias": "I S(0); each use"}
    ),
    "replicated work": lambda raw: raw["stages"][0]["operators"].update(WHOLE_TAIL),
    "a sum brought together by parts": lambda raw: raw["stages"][0]["operators"].update(
        {DOWN_ADD: "I S(0), I R -> I S(0)", "/cross_entropy_loss#0": "I S(1), I R -> I I"}
    ),
    "other microbatches": lambda raw: raw.update(microbatches=4),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal_edits_run_with_parity(name: str, tiny: Plan, tmp_path: Path, workers: Pool) -> None:
    raw = json.loads(tiny.data.to_json())
    LEGAL[name](raw)
    assert raw != json.loads(tiny.data.to_json())
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(raw))
    found = workers(2).run(train_planned, TINY, str(file))
    wrong = errors([trained for trained, _ in found], reference("tiny"))
    assert {name: e for name, e in wrong.items() if not e <= TOLERANCE} == {}


def test_a_plan_in_float64_is_laid_on_the_users_model(tmp_path: Path) -> None:
    """The program's inputs are float64; the user's stay float32."""
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(8, 4))
    inputs, loss = (torch.randn(4, 2, 2),), lambda out, _: out.square().mean()
    plan = autopar.plan(model, (1, 2), inputs, precision="fp64", stages=1, loss_fn=loss)
    plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json").bind(model, loss_fn=loss)
    assert again.code() == plan.code()


def test_a_plan_of_version_0_3_0_loads(tiny: Plan) -> None:
    """Such a file has `gap` for `stage_gap`, and lacks the keys `recipe` and `bound_s`."""
    raw = json.loads(tiny.data.to_json())
    raw["gap"] = raw.pop("stage_gap")
    del raw["recipe"], raw["bound_s"]
    assert parse_plan(json.dumps(raw)) == replace(tiny.data, recipe="")
