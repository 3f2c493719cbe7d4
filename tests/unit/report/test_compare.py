"""`autopar.compare` and its command: plans side by side, and where they differ."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autopar
from autopar.errors import OptionError, PlanError
from autopar.report.comparison import UNKNOWN
from autopar.units import format_seconds
from tests.helpers import commands
from tests.helpers.commands import command, good
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


@cache
def recipe(dp: int = 1, tp: int = 1) -> autopar.Plan:
    return planned(manual=autopar.Manual(dp=dp, tp=tp))


def section(text: str, title: str) -> dict[str, list[str]]:
    """The cells of each row of one section of the text, by the row's name."""
    lines = text.split(f"{title}\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_costs_and_collectives_side_by_side() -> None:
    pipelined = planned(stages=[(["up"], (1, 1)), (["down"], (1, 1))], microbatches=2)
    plans = (recipe(dp=2), recipe(tp=2), pipelined)
    comparison = autopar.compare(*plans)
    found = json.loads(comparison.to_json())
    assert found["same_graph"] is True and found["notes"] == []
    for entry, plan in zip(found["plans"], plans, strict=True):
        assert entry["predicted"]["step_time_s"] == plan.predicted.step_time_s
        assert entry["predicted"]["peak_bytes"] == plan.predicted.peak_bytes
        of_stage = Counter[tuple[str, str, int]]()
        for c in plan.collectives():
            of_stage[c.phase, c.kind, c.stage] += c.count * c.size_bytes
        # A row shows the stage that moves the most bytes in this phase and kind.
        wanted = {(phase, kind): 0 for phase, kind, _ in of_stage}
        for (phase, kind, _), n_bytes in of_stage.items():
            wanted[phase, kind] = max(wanted[phase, kind], n_bytes)
        moved = {(row["phase"], row["kind"]): row["size_bytes"] for row in entry["collectives"]}
        assert moved == wanted
    text = comparison.text()
    relative = section(text, "predicted, per step")["step time, relative"]
    assert relative[0] == "x 1" and len(relative) == 3
    stages = section(text, "stages")
    assert stages["stage 1"][:2] == [UNKNOWN, UNKNOWN]
    assert stages["stage 1"][2].startswith("dp=1 x tp=1, ")


def test_steps_within_the_error_are_marked() -> None:
    plan = recipe(dp=2)
    row = section(autopar.compare(plan, plan).text(), "predicted, per step")
    assert row["step time, relative"] == ["x 1", "x 1, within the error"]
    assert plan.predicted.interval_s is not None
    low, high = map(format_seconds, plan.predicted.interval_s)
    assert row["80% of steps"] == [f"{low} to {high}"] * 2
    for other in (
        planned(n_rows=16, manual=autopar.Manual(dp=2)),
        plan.what_if("device.launch_s=1x"),
    ):
        row = section(autopar.compare(plan, other).text(), "predicted, per step")
        assert "within" not in row["step time, relative"][1]


def test_what_is_placed_otherwise() -> None:
    found = json.loads(autopar.compare(recipe(dp=2), recipe(tp=2)).to_json())
    assert found["parameters"]["up.weight"] == ["whole", "S(0) on tp=2"]
    assert found["parameters"]["down.weight"] == ["whole", "S(1) on tp=2"]
    assert "down.bias" not in found["parameters"]
    assert any(texts[0] == "S(0) on dp=2" for texts in found["operators"].values())


def test_a_plan_and_itself_differ_in_nothing() -> None:
    comparison = autopar.compare(recipe(tp=2), recipe(tp=2))
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


def test_plans_of_other_graphs_say_so() -> None:
    other = planned(n_rows=16, manual=autopar.Manual(dp=2))
    comparison = autopar.compare(recipe(dp=2), other)
    (note,) = json.loads(comparison.to_json())["notes"]
    assert note.startswith("these are plans of different graphs. plan 1: Tiny on ")
    assert "float32[8, 8]" in note and "float32[16, 8]" in note
    assert comparison.text().startswith(note)
    assert comparison.same_graph is False


def test_plans_without_their_model_have_placements_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    recipe(tp=2).save(path)
    loaded = autopar.Plan.load(path)
    found = json.loads(autopar.compare(recipe(dp=2), loaded).to_json())
    bound = json.loads(autopar.compare(recipe(dp=2), recipe(tp=2)).to_json())
    assert found["plans"][1]["predicted"] is found["plans"][1]["collectives"] is None
    assert found["parameters"] == bound["parameters"]
    assert found["notes"] == ["costs need the model, which is not given for plan 2"]
    text = autopar.compare(loaded, loaded).text()
    assert "predicted" not in text and "stage 0" in text
    rows = section(autopar.compare(loaded, recipe(dp=2)).text(), "predicted, per step")
    assert rows["step time, relative"] == [UNKNOWN, "x 1"]


def test_the_facts_of_the_page() -> None:
    unbound = autopar.Plan(recipe(tp=2).data)
    compared = autopar.compare(recipe(dp=2), recipe(tp=2), unbound)
    named = replace(compared, names=("<a>", "b & c", "d"))
    facts = page_facts(named.html())
    assert facts["names"] == ["<a>", "b & c", "d"]
    assert [bars.get("time", {}).get("step_time_s") for bars in facts["bars"]] == [
        recipe(dp=2).predicted.step_time_s, recipe(tp=2).predicted.step_time_s, None,
    ]  # fmt: skip
    cells = {cell for table in facts["tables"] for row in table["rows"] for cell in row}
    assert {"up.weight", "S(0) on tp=2", "step time"} <= cells
    assert facts["notes"] == ["costs need the model, which is not given for d"]


def test_two_plans_at_least() -> None:
    for plans in ((), (recipe(tp=2),)):
        with pytest.raises(OptionError, match=f"{len(plans)} to compare"):
            autopar.compare(*plans)


def test_a_plan_that_was_edited_to_nonsense() -> None:
    (stage,) = recipe(tp=2).data.stages
    bad = replace(stage, parameters={**stage.parameters, "up.weight": "S(0)"})
    edited = autopar.Plan(replace(recipe(tp=2).data, stages=(bad,)))
    with pytest.raises(PlanError, match="on 1 axes"):
        autopar.compare(recipe(tp=2), edited).text()


def run(*words: str) -> Any:
    return good(command("compare", *words, "--json"))


def refused(*words: str) -> str:
    return commands.refused(command("compare", *words))


MODEL = f"{__name__}:tiny"


def test_files_and_a_model(tmp_path: Path) -> None:
    one, two, page = (str(tmp_path / name) for name in ("one.json", "two.json", "page.html"))
    recipe(dp=2).save(one)
    recipe(tp=2).save(two)
    bound = run(one, two, "--model", MODEL, "-o", page)
    assert [entry["name"] for entry in bound["plans"]] == [one, two]
    step_s = [entry["predicted"]["step_time_s"] for entry in bound["plans"]]
    assert step_s == [plan.predicted.step_time_s for plan in (recipe(dp=2), recipe(tp=2))]
    assert bound["written"] == page and Path(page).read_text().startswith("<!DOCTYPE html>")
    alone = run(one, two)
    assert [entry["predicted"] for entry in alone["plans"]] == [None, None]
    assert alone["parameters"] == bound["parameters"]
    words = ("--mesh", "1x2", "--hardware", "a100-80gb", "--manual", "tp=2")
    mixed = run(one, MODEL, "--model", MODEL, *words)
    assert mixed["parameters"] == bound["parameters"]
    assert "--mesh" in refused(one, two, "--mesh", "1x2")
    assert "cannot write" in refused(one, two, "-o", "nowhere/page.html")


def test_wrong_use_of_compare() -> None:
    assert "1 to compare" in refused(MODEL, "--mesh", "1x2")
    assert "none is given" in refused(MODEL, MODEL, "--model", MODEL, "--mesh", "1x2")
    assert "a mesh is needed" in refused(MODEL, MODEL)
