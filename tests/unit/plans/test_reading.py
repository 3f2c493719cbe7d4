"""What is in a plan file is checked value by value, and its place is named where it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import Mesh, OptionError, Plan, PlanError
from autopar.cost.hardware import PROFILE_FOLDER, load_profile
from autopar.plans import parse_plan
from autopar.plans.json_values import MOST_FILE_BYTES
from tests.helpers.commands import command, good, refused
from tests.helpers.models.tiny_model import Tiny, batch

PLAN = (Path(__file__).parents[2] / "golden" / "tiny_plan.json").read_text()
Raw = dict[str, Any]


def at(place: str, value: Any) -> Callable[[Raw], None]:
    """Sets the value at a place such as `stages.0.axes.dp`; `...` removes it."""

    def edit(raw: Raw) -> None:
        *parents, last = place.split(".")
        holder: Any = raw
        for key in parents:
            holder = holder[int(key)] if isinstance(holder, list) else holder[key]
        if value is ...:
            holder.pop(last)
        else:
            holder[int(last) if isinstance(holder, list) else last] = value

    return edit


WRONG: dict[str, tuple[str, Any, str]] = {
    "an axis's size": ("stages.0.axes.dp", "x", "stages[0].axes.dp is 'x'; expected a whole"),
    "a huge axis": ("stages.0.axes.dp", 10**9, "stages[0].axes.dp is 1000000000; expected"),
    "axes of more ranks": ("stages.0.axes.dp", 2, "stages[0].axes hold 4 ranks, stages[0].mesh_s"),
    "an axis name": ("stages.0.axes", {"class": 2}, "a key of stages[0].axes is 'class'"),
    "axes that clash": (
        "stages.0.axes", {"a": 1, "b": 1, "a_b": 2}, "expected names that differ when some are"),
    "many axes": (
        "stages.0.axes", {f"a{i}": 1 for i in range(40)}, "an object of 40 keys; expected an obj"),
    "a shape of floats": ("inputs.0.shape", [16.0, 8], "inputs[0].shape[0] is 16.0; expected a wh"),
    "a negative shape": ("inputs.0.shape", [-16, 8], "inputs[0].shape[0] is -16; expected a whole"),
    "a huge shape": ("inputs.0.shape", [2**40, 2**40], "elements"),
    "no dtype": ("inputs.0.dtype", 1, "inputs[0].dtype is 1; expected one of bfloat16"),
    "a dtype of no input": ("inputs.0.dtype", "quint8", "inputs[0].dtype is 'quint8'"),
    "positional": ("positional", True, "positional inputs are at 0, 1 and so on"),
    "positional as a number": ("positional", 1, "positional is 1; expected true or false"),
    "an input twice": ("inputs.1.path", "x", "have 'x' twice"),
    "batch dims": ("batch_dims", 5, "batch_dims is 5; expected an object"),
    "a batch dim": ("batch_dims", {"x": 2}, "batch_dims.x is 2; expected a whole number from 0"),
    "a batch dim of none": ("batch_dims", {"z": 0}, "batch_dims.z is of no input"),
    "static inputs": ("static_inputs", [1], "static_inputs is a list of 1; expected an object"),
    "a nested static input": ("static_inputs", {"n": [1]}, "static_inputs.n is a list of 1"),
    "seconds": ("alternatives.0.step_time_s", "x", "alternatives[0].step_time_s is 'x'"),
    "seconds without end": ("objective_s", float("inf"), "objective_s is a number that is not"),
    "no number": ("stage_gap", float("nan"), "stage_gap is a number that is not finite"),
    "comments": ("comments", [], "comments is a list of 0; expected an object"),
    "a comment": ("comments", {"x": 1}, "comments.x is 1; expected one line of text"),
    "padding": ("padded", {"side": [8]}, "padded.side is of no parameter"),
    "a padded size": ("padded", {"up.bias": ["x"]}, "padded['up.bias'][0] is 'x'"),
    "an optimizer": ("optimizer", "adafactor", "optimizer is 'adafactor'; expected one of adam"),
    "a precision": ("precision", "fp8", "precision is 'fp8'; expected one of"),
    "a word of forbid": ("forbid", ["x"], "forbid[0] is 'x'; expected one of"),
    "a control character": ("chosen", "\x1b[2J", "chosen is '\\x1b[2J'; expected one line"),
    "a long text": ("chosen", "x" * 10**5, "of at most 10,000 characters"),
    "a bool for a number": ("microbatches", True, "microbatches is true; expected a whole number"),
    "many microbatches": ("microbatches", 10**9, "microbatches is 1000000000; expected a whole"),
    "many devices": ("mesh.shape", [10**6, 10**6], "mesh.shape has 1,000,000,000,000 ranks"),
    "a mesh of four axes": ("mesh.shape", [1] * 4, "mesh.shape is a list of 4; expected a list"),
    "a rate of 0": ("mesh.device.flops_per_s", 0, "mesh.device.flops_per_s is 0; expected a numb"),
    "a link's fields": ("mesh.links.0", [1.0], "mesh.links[0] is a list of 1; expected a list of"),
    "another mesh": ("mesh.shape", [1, 4], "stages hold 2 ranks, the mesh has 4"),
    "a placement": ("stages.0.parameters", {"up.bias": 1}, "stages[0].parameters['up.bias'] is 1"),
    "a newline in a name": ("stages.0.operators", {"/relu#0\nimport os": "I"}, "one line of text"),
    "a newline in a text": ("stages.0.operators", {"/relu#0": "I R ->\nI R"}, "one line of text"),
    "a newline of a model": ("model", "A\nB", "model is 'A\\nB'; expected one line"),
    "an axis that is no name": ("stages.0.axes", {"dp": 1, "t p": 2}, "stages[0].axes is 't p'"),
    "no microbatch": ("microbatches", 0, "microbatches is 0; expected"),
    "another version": ("version", 99, "version 99"),
    "an unknown key": ("code", "import os", "unknown keys ['code']"),
    "a missing key": ("stages", ..., "missing keys ['stages']"),
    "an unknown key of a stage": ("stages.0.code", "x", "unknown keys ['code']"),
    "a missing key of a stage": ("stages.0.operators", ..., "missing keys ['operators']"),
    "a missing boundary": ("stages.0.received", ..., "missing keys ['received']"),
    "a table that is none": ("stages.0.operators", [1], "operators is a list of 1"),
    "a boundary that is none": ("stages.0.sent", [1], "stages[0].sent is a list of 1;"),
    "no stage": ("stages", [], "stages is a list of 0; expected"),
    "stages that are none": ("stages", [1], "stages[0] is 1; expected"),
    "where a stage begins": ("stages.0.begins_at", 3, "stages[0].begins_at is 3; expected"),
    "another schedule": ("schedule", "2f2b", "'2f2b'; expected one of 1f1b"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_place(name: str) -> None:
    place, value, message = WRONG[name]
    raw = json.loads(PLAN)
    at(place, value)(raw)
    with pytest.raises(PlanError, match=re.escape(message)) as refusal:
        parse_plan(json.dumps(raw), "plan.json")
    assert "plan.json" in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_a_key_that_occurs_twice_is_refused() -> None:
    for text, place in (
        ('"microbatches": 2', "microbatches"),
        ('"up.weight": "I S(0)"', "stages[0].parameters['up.weight']"),
    ):
        with pytest.raises(PlanError, match=re.escape(f"{place} is there twice")):
            parse_plan(PLAN.replace(text, f"{text}, {text}"))


BROKEN = {
    "not UTF-8": (PLAN.encode("utf-16"), "is not UTF-8, from byte 0 on"),
    "a byte that is none": (PLAN.encode().replace(b"Tiny", b"T\xffny"), "is not UTF-8, from byte"),
    "nested without end": (b"[" * 10**6, "nests lists or objects too deeply"),
    "objects without end": (b'{"x":' * 10**6, "nests lists or objects too deeply"),
    "a number without end": (
        PLAN.replace('"microbatches": 2', f'"microbatches": {"9" * 10**5}').encode(),
        "microbatches is a number that is not finite",
    ),
    "the end is missing": (PLAN.encode()[:-20], "is not JSON"),
    "a list": (b"[]", "the document is a list of 0"),
    "nothing": (b"", "is not JSON"),
    "keys that are missing": (b'{"version": 2}', "missing keys"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_document_is_refused(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=re.escape(message)) as refusal:
        Plan.load(file)
    assert "plan.json" in str(refusal.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is no file, but a folder or a device"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="is no file, but a folder or a device"):
        Plan.load("/dev/zero")
    with pytest.raises(PlanError, match=r"cannot read 'a.x00b'"):
        Plan.load("a\0b")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MOST_FILE_BYTES + 1)
    with pytest.raises(PlanError, match=r"has 33,554,433 bytes; a plan has at most 33,554,432"):
        Plan.load(large)


# -- hardware ----------------------------------------------------------------------------------

OWN = (PROFILE_FOLDER / "h100-sxm.toml").read_text().replace('"h100-sxm"', '"our box"')


@pytest.fixture
def own_profile(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(f'# sesame\n{OWN}\n[secret]\npassword = "sesame"\n')
    return path


@pytest.mark.parametrize("name", ["own.toml", "/etc/hostname.toml", "../own.toml", "tpu"])
def test_a_path_in_a_plan_is_never_opened(name: str, own_profile: Path) -> None:
    raw = json.loads(PLAN)
    raw["mesh"]["hardware"] = str(own_profile) if name == "own.toml" else name
    plan = Plan(parse_plan(json.dumps(raw)))
    with pytest.raises(
        PlanError, match=r"no shipped profile[\s\S]*plan\.bind\(model, autopar\.M"
    ) as no:
        plan.bind(Tiny())
    assert "sesame" not in str(no.value)
    with pytest.warns(UserWarning, match="the plan was made for"):
        bound = plan.bind(Tiny(), Mesh((1, 2), hardware="h100-sxm"))
    assert bound.predicted.step_time_s > 0


def test_a_plan_carries_the_figures_of_ones_own_profile(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(OWN)
    made = autopar.plan(Tiny(), Mesh((1, 2), hardware=path), batch())
    made.save(tmp_path / "plan.json")
    path.unlink()
    text = (tmp_path / "plan.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["mesh"]["hardware"] == "our box"
    loaded = Plan.load(tmp_path / "plan.json").bind(Tiny())
    assert loaded.predicted == made.predicted
    assert loaded.what_if("device.launch_s=2x").predicted.step_time_s > made.predicted.step_time_s


def test_a_mesh_of_ones_own_profile_fits_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text(OWN)
    made = autopar.plan(Tiny(), Mesh((1, 2), hardware=str(path)), batch())
    assert Plan(made.data).bind(Tiny(), Mesh((1, 2), hardware=path)).predicted == made.predicted
    path.write_text(OWN.replace("value = 3.35e12", "value = 3.3e12"))
    assert "3.3e12" in path.read_text()
    with pytest.warns(UserWarning, match="it runs on other figures of our box"):
        Plan(made.data).bind(Tiny(), Mesh((1, 2), hardware=path))


def test_wrong_figures_are_refused() -> None:
    raw = json.loads(PLAN)
    raw["mesh"] |= {"hardware": "our box", "figures": {"device.launch_s": 1.0}}
    with pytest.raises(OptionError, match=r"missing [\s\S]*the figures of 'our box' in a plan"):
        Plan(parse_plan(json.dumps(raw))).bind(Tiny())
    raw["mesh"]["figures"] = {"device.launch_s": -1.0}
    with pytest.raises(PlanError, match=r"mesh.figures\['device.launch_s'\] is -1.0; expected"):
        parse_plan(json.dumps(raw))


def test_errors_do_not_show_what_is_in_a_profile(own_profile: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"secret\.password has no source") as refusal:
        load_profile(own_profile)
    assert "sesame" not in str(refusal.value)
    other = tmp_path / "other.toml"
    for content, message in (
        (b"sesame sesame", "is not TOML"),
        (b"\xff\xfe", "is not UTF-8, from byte 0 on"),
        (b"x = " + b"[" * 10**5, "is not TOML: RecursionError"),
        (b"x = " + b"9" * 5000, "is not TOML: ValueError"),
        (b"x" * 2**19, "has more than 262,144 bytes"),
    ):
        other.write_bytes(content)
        with pytest.raises(OptionError, match=message) as refusal:
            load_profile(other)
        assert "sesame" not in str(refusal.value)


# -- the command line --------------------------------------------------------------------------


def tiny() -> tuple[Tiny, Any]:
    return Tiny(), batch()


def test_a_saved_plan_is_priced_on_hardware_that_is_given(tmp_path: Path) -> None:
    file, own = tmp_path / "plan.json", tmp_path / "here.toml"
    raw = json.loads(PLAN)
    raw["mesh"]["hardware"] = "gone.toml"
    made = autopar.plan(Tiny(), (1, 2), batch(), precision="fp64")
    raw["graph_hash"] = made.data.graph_hash
    file.write_text(json.dumps(raw))
    own.write_text(OWN)
    words = ("explain", str(file), "--model", f"{__name__}:tiny")
    assert "--hardware" in refused(command(*words))
    with pytest.warns(UserWarning, match="made for gone.toml; it runs on our box"):
        good(command(*words, "--hardware", str(own), "--json"))
    alone = command("explain", str(file), "--hardware", "h100-sxm")
    assert "give --model MODEL too" in refused(alone)
