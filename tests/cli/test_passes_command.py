"""`autopar passes`: the list of passes, and what each took for a model or a saved plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.passes.pipeline import PASSES
from tests.helpers.commands import command, good, refused

MODEL = "examples.demo:mlp"
MESH = ("--mesh", "1x2", "--hardware", "a100-80gb")


def rows(*args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = good(command("passes", *args, "--json"))["passes"]
    return found


def test_without_a_model_it_is_the_list() -> None:
    listed = rows()
    assert [row["name"] for row in listed] == [one.name() for one in PASSES]
    text = command("passes").stdout
    for row in listed:
        assert f"{', '.join(row['requires'])} -> {', '.join(row['provides'])}" in text
        assert row["purpose"] in text


def test_of_a_model_it_is_what_each_took() -> None:
    """The search hands on its own analysis, placements and prediction."""
    listed = {row["name"]: row for row in rows(MODEL, *MESH)}
    assert list(listed) == [one.name() for one in PASSES]
    idle = {name for name, row in listed.items() if row["seconds"] is None}
    assert idle == {"analyse", "resolve-mesh", "place", "price"}
    assert listed["capture"]["made"]["Program"].endswith("4 parameters")
    assert "considered" in listed["search"]["made"]["PlanningResult"]
    assert listed["emit"]["made"]["Sources"].startswith("1 file, ")


def test_of_a_saved_plan_nothing_is_searched(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    good(command("plan", MODEL, *MESH, "-o", plan, "--json"))
    listed = {row["name"]: row["seconds"] for row in rows(plan, "--model", MODEL)}
    assert listed["search"] is listed["record"] is None
    assert listed["place"] > 0 and listed["price"] > 0


def test_of_a_programs_text_some_passes_run(tmp_path: Path) -> None:
    text = Path(__file__).parents[1] / "golden" / "passes" / "tp_lowered.txt"
    assert command("passes", str(text)).stdout == text.read_text()
    emitted = good(command("passes", str(text), "--only", "differentiate,emit", "--json"))
    assert "def backward(" in emitted["texts"][0]
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(text.read_text().replace("args=(relu,", "args=(absent,"))
    assert "absent is read before" in refused(command("passes", str(wrong)))
    assert "is for a program's text" in refused(command("passes", MODEL, *MESH, "--only", "emit"))
    assert "cannot read" in refused(command("passes", str(tmp_path / "none.txt")))
