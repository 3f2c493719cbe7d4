"""`autopar.compare` and its command: plans side by side, and where they differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import WRONG_USE, app
from autopar.errors import OptionError, PlanError
from autopar.report.comparison import UNKNOWN
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.page import page_facts

MESH = autopar.Mesh((1, 2), hardware="a100-80gb")


class Deep(nn.Module):
    """Three blocks with equal placements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Any, labels: Any) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.cross_entropy(x, labels)


def tiny() -> tuple[Any, Any]:
    """A model factory for the command line."""
    return Tiny(), batch()


def planned(model: nn.Module | None = None, n_rows: int = 8, **options: Any) -> autopar.Plan:
    return autopar.plan(model or Tiny(), MESH, batch(n_rows=n_rows), **options)


@pytest.fixture(scope="module")
def data_parallel() -> autopar.Plan:
    return planned(manual=autopar.Manual(dp=2))


@pytest.fixture(scope="module")
def megatron() -> autopar.Plan:
    return planned(manual=autopar.Manual(tp=2))


@pytest.fixture(scope="module")
def pipelined() -> autopar.Plan:
    return planned(stages=[(["up"], (1, 1)), (["down"], (1, 1))], microbatches=2)


def section(text: str, title: str) -> dict[str, list[str]]:
    """The cells of each row of one section of the text, by the row's name."""
    lines = text.split(f"{title}\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_costs_and_collectives_side_by_side(
    data_parallel: autopar.Plan, megatron: autopar.Plan, pipelined: autopar.Plan
) -> None:
    plans = (data_parallel, megatron, pipelined)
    comparison = autopar.compare(*plans)
    found = json.loads(comparison.to_json())
    assert found["same_graph"] is True and found["notes"] == []
    for entry, plan in zip(found["plans"], plans, strict=True):
        assert entry["predicted"]["step_time_s"] == plan.predicted.step_time_s
        assert entry["predicted"]["peak_bytes"] == plan.predicted.peak_bytes
        moved = {(row["phase"], row["kind"]): row for row in entry["collectives"]}
        for (phase, kind), row in moved.items():
            # A row shows the stage that moves the most bytes in this phase and kind.
            of_stage: dict[int, int] = {}
            for c in plan.collectives():
                if (c.phase, c.kind) == (phase, kind):
                    of_stage[c.stage] = of_stage.get(c.stage, 0) + c.count * c.size_bytes
            assert row["size_bytes"] == max(of_stage.values())
        assert set(moved) == {(c.phase, c.kind) for c in plan.collectives()}
    text = comparison.text()
    relative = section(text, "predicted, per step")["step time, relative"]
    assert relative[0] == "x 1" and len(relative) == 3
    stages = section(text, "stages")
    assert stages["stage 1"][:2] == [UNKNOWN, UNKNOWN]
    assert stages["stage 1"][2].startswith("dp=1 x tp=1, ")


def test_what_is_placed_otherwise(data_parallel: autopar.Plan, megatron: autopar.Plan) -> None:
    found = json.loads(autopar.compare(data_parallel, megatron).to_json())
    assert found["parameters"]["up.weight"] == ["whole", "S(0) on tp=2"]
    assert found["parameters"]["down.weight"] == ["whole", "S(1) on tp=2"]
    assert "down.bias" not in found["parameters"]
    assert any(texts[0] == "S(0) on dp=2" for texts in found["operators"].values())


def test_a_plan_and_itself_differ_in_nothing(megatron: autopar.Plan) -> None:
    comparison = autopar.compare(megatron, megatron)
    found = json.loads(comparison.to_json())
    assert (found["parameters"], found["operators"]) == ({}, {})
    assert "\n\nparameters, as they are stored: 0 of 4 differ\n\n" in comparison.text()


def test_parameters_that_differ_alike_are_one_row() -> None:
    pins = {f"layers.{k}.weight": "S(0)@1" for k in range(3)}
    plain = planned(Deep(), force=dict.fromkeys(pins, "I@1"), mesh_shape="as-given")
    pinned = planned(Deep(), force=pins, mesh_shape="as-given")
    text = autopar.compare(plain, pinned).text()
    rows = section(text, "parameters, as they are stored: 3 of 3 differ")
    assert rows["layers.*.weight (3)"] == ["whole", "S(0) on device=2"]


def test_plans_of_other_graphs_say_so(data_parallel: autopar.Plan) -> None:
    other = planned(n_rows=16, manual=autopar.Manual(dp=2))
    comparison = autopar.compare(data_parallel, other)
    (note,) = json.loads(comparison.to_json())["notes"]
    assert note.startswith("these are plans of different graphs. plan 1: Tiny on ")
    assert "float32[8, 8]" in note and "float32[16, 8]" in note
    assert comparison.text().startswith(note)
    assert comparison.same_graph is False


def test_plans_without_their_model_have_placements_alone(
    data_parallel: autopar.Plan, megatron: autopar.Plan, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    megatron.save(path)
    loaded = autopar.Plan.load(path)
    found = json.loads(autopar.compare(data_parallel, loaded).to_json())
    bound = json.loads(autopar.compare(data_parallel, megatron).to_json())
    assert found["plans"][1]["predicted"] is found["plans"][1]["collectives"] is None
    assert found["parameters"] == bound["parameters"]
    assert found["notes"] == ["costs need the model, which is not given for plan 2"]
    text = autopar.compare(loaded, loaded).text()
    assert "predicted" not in text and "stage 0" in text
    assert section(autopar.compare(loaded, data_parallel).text(), "predicted, per step")[
        "step time, relative"
    ] == [UNKNOWN, "x 1"]


def test_the_facts_of_the_page(data_parallel: autopar.Plan, megatron: autopar.Plan) -> None:
    unbound = autopar.Plan(megatron.data)
    named = replace(autopar.compare(data_parallel, megatron, unbound), names=("<a>", "b & c", "d"))
    facts = page_facts(named.html())
    assert facts["names"] == ["<a>", "b & c", "d"]
    assert [bars.get("time", {}).get("step_time_s") for bars in facts["bars"]] == [
        data_parallel.predicted.step_time_s, megatron.predicted.step_time_s, None,
    ]  # fmt: skip
    cells = {cell for table in facts["tables"] for row in table["rows"] for cell in row}
    assert {"up.weight", "S(0) on tp=2", "step time"} <= cells
    assert facts["notes"] == ["costs need the model, which is not given for d"]


def test_two_plans_at_least(megatron: autopar.Plan) -> None:
    for plans in ((), (megatron,)):
        with pytest.raises(OptionError, match=f"{len(plans)} to compare"):
            autopar.compare(*plans)


def test_a_plan_that_was_edited_to_nonsense(megatron: autopar.Plan) -> None:
    (stage,) = megatron.data.stages
    bad = replace(stage, parameters={**stage.parameters, "up.weight": "S(0)"})
    edited = autopar.Plan(replace(megatron.data, stages=(bad,)))
    with pytest.raises(PlanError, match="on 1 axes"):
        autopar.compare(megatron, edited).text()


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["compare", *words], prog_name="autopar")


def refused(*words: str) -> str:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (WRONG_USE, ""), result.output
    return result.stderr


MODEL = f"{__name__}:tiny"


def test_files_and_a_model(
    data_parallel: autopar.Plan, megatron: autopar.Plan, tmp_path: Path
) -> None:
    one, two, page = (str(tmp_path / name) for name in ("one.json", "two.json", "page.html"))
    data_parallel.save(one)
    megatron.save(two)
    bound = json.loads(run(one, two, "--model", MODEL, "-o", page, "--json").stdout)
    assert [entry["name"] for entry in bound["plans"]] == [one, two]
    step_s = [entry["predicted"]["step_time_s"] for entry in bound["plans"]]
    assert step_s == [plan.predicted.step_time_s for plan in (data_parallel, megatron)]
    assert bound["written"] == page and Path(page).read_text().startswith("<!DOCTYPE html>")
    alone = json.loads(run(one, two, "--json").stdout)
    assert [entry["predicted"] for entry in alone["plans"]] == [None, None]
    assert alone["parameters"] == bound["parameters"]
    words = ("--mesh", "1x2", "--hardware", "a100-80gb", "--manual", "tp=2")
    mixed = json.loads(run(one, MODEL, "--model", MODEL, *words, "--json").stdout)
    assert mixed["parameters"] == bound["parameters"]
    assert "--mesh" in refused(one, two, "--mesh", "1x2")
    assert "cannot write" in refused(one, two, "-o", "nowhere/page.html")


def test_wrong_use_of_compare() -> None:
    assert "1 to compare" in refused(MODEL, "--mesh", "1x2")
    assert "none is given" in refused(MODEL, MODEL, "--model", MODEL, "--mesh", "1x2")
    assert "a mesh is needed" in refused(MODEL, MODEL)
