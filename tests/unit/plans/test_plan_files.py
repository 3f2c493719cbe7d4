"""Plan files: a saved plan runs unchanged, and is refused by another model, mesh or option."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar import CaptureError, MeshError, OptionError, Plan, PlanError
from autopar.cost.hardware import resolve
from autopar.mesh import Device, Link, Mesh
from autopar.passes.binding import mesh_of, record_of
from autopar.plans import parse_plan
from autopar.runtime.launch import WorkerPool
from tests.conftest import Golden
from tests.helpers.jobs import CASES, Cell, Trained, gpt2, machine, train, train_planned
from tests.helpers.models.tiny_model import Tiny

TINY = Cell("tiny", (1, 2), "megatron", 2)
Pool = Callable[[int], WorkerPool]


def make_plan(cell: Cell) -> Plan:
    case = cell.case
    return autopar.plan(case.model(), machine(cell.shape), case.batch(0), **cell.options())


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return make_plan(TINY)


def check_alike(planned: Trained, loaded: tuple[Trained, dict[str, str]], plan: Plan) -> None:
    again, code = loaded
    assert planned.losses == again.losses
    assert planned.values.keys() == again.values.keys()
    assert all(torch.equal(v, again.values[n]) for n, v in planned.values.items())
    assert code == plan.code()


def test_a_saved_plan_trains_bitwise_alike(tmp_path: Path) -> None:
    cell = Cell("tiny", (1, 1), "megatron", 2)
    plan = make_plan(cell)
    plan.save(tmp_path / "plan.json")
    check_alike(train(cell), train_planned(cell, str(tmp_path / "plan.json")), plan)


def test_a_file_is_read_back_whole(tiny: Plan, tmp_path: Path) -> None:
    """Unbound, it says what it lacks; bound, it has that anew."""
    tiny.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.data == tiny.data
    assert loaded.placements == tiny.placements
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    for ask in (loaded.code, loaded.collectives, lambda: loaded.predicted, lambda: loaded.uses):
        with pytest.raises(PlanError, match=r"only loaded[\s\S]*plan\.bind\(model\)"):
            ask()
    bound = loaded.bind(CASES["tiny"].model())
    assert bound.code() == tiny.code() == make_plan(TINY).code()
    assert bound.collectives() == tiny.collectives()
    assert bound.predicted == tiny.predicted
    assert bound.uses == tiny.uses


def test_a_switch_that_sums_is_read_back(tiny: Plan) -> None:
    links = [Link(1e-5, 1e-9), Link(1e-6, 1e-11, 1.2e-11)]
    mesh = Mesh((2, 1), links=links, device=Device(1e12, 1e11, 1e9))
    data = replace(tiny.data, mesh=record_of(mesh, resolve(mesh)))
    assert mesh_of(parse_plan(data.to_json()).mesh) == mesh


def test_golden_program_and_plan(tiny: Plan, golden: Golden) -> None:
    ((name, source),) = tiny.code().items()
    assert name == "stage_0.py"
    golden("tiny_stage_0.txt", source)
    golden("tiny_plan.json", tiny.data.to_json())


def test_no_path_of_this_machine_is_written() -> None:
    plan = make_plan(Cell("gpt2", (1, 2), "sequence", 1))
    for text in (plan.data.to_json(), *plan.code().values()):
        assert not re.search(r"(?<![\w/.-])(/[\w.-]+){2,}/[\w.-]+\.py", text)
        assert str(Path(__file__).parents[3]) not in text
        assert str(Path(torch.__file__).parents[1]) not in text


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
    mesh = autopar.Mesh((1, 2), hardware="a100-80gb")
    plan = autopar.plan(case.model(), mesh, case.batch(0), manual=autopar.Manual(tp=2))
    with pytest.warns(UserWarning, match="made for a100-80gb; it runs on cpu-local"):
        bound = plan.bind(case.model(), autopar.Mesh((1, 2), hardware="cpu-local"))
    assert bound.data == plan.data
    assert bound.predicted.step_time_s != plan.predicted.step_time_s


def test_options_beside_a_plan_are_refused(tiny: Plan) -> None:
    """The plan has decided these options; ignoring them silently would mislead."""
    for option, text in ({"microbatches": 4}, "microbatches=4"), ({"precision": "model"}, "prec"):
        with pytest.raises(OptionError, match=f"{text}[\\s\\S]*plan again"):
            autopar.parallelize(CASES["tiny"].model(), machine((1, 2)), plan=tiny, **option)


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
