"""What-if changes of a machine's figures: how they are parsed, and how a step changes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cost.hardware import (
    available_profiles,
    changed,
    doublings,
    load_profile,
    parse_changes,
)
from autopar.cost.hardware.what_if import Change
from autopar.errors import MeshError, OptionError
from tests.helpers.commands import good, refused
from tests.helpers.models.tiny_model import Tiny, batch

ALL_TWICE_AS_FAST = (
    "device.peak_flops_per_s=2x,device.peak_bytes_per_s=2x,device.launch_s=0.5x,"
    "device.host_s=0.5x,link.intra_node.latency_s=0.5x,link.intra_node.s_per_byte=0.5x,"
    "link.intra_node.in_switch_s_per_byte=0.5x,link.inter_node.latency_s=0.5x,"
    "link.inter_node.s_per_byte=0.5x,link.intra_node.chunk_s=0.5x"
)
KEYS = st.sampled_from(sorted(load_profile("h100-sxm").quantities))


def tiny() -> tuple[Any, Any]:
    """A model factory for the command line."""
    return Tiny(), batch()


def two_stages() -> autopar.Plan:
    """Two stages of two ranks on two nodes: all links and lanes are used."""
    mesh = autopar.Mesh((2, 2), hardware="h100-sxm")
    stages = [(["up"], (1, 2)), (["down"], (1, 2))]
    return autopar.plan(Tiny(), mesh, batch(), stages=stages, microbatches=2)


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return two_stages()


@given(KEYS, st.floats(1e-30, 1e30), st.booleans())
def test_a_change_is_read_as_it_is_written(key: str, number: float, is_factor: bool) -> None:
    text = f"{key}={number!r}{'x' * is_factor}"
    assert parse_changes(text) == (Change(key, number, is_factor),)
    assert parse_changes(f"{text}, {text}") == parse_changes(text) * 2


@pytest.mark.parametrize("text", ["", "a", "a=", "a=x", "a=1y", "a=-1", "a=1.2.3x", "a=nan", "=2x"])
def test_what_changes_nothing_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="changes nothing"):
        parse_changes(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device.colour=2x", "has no figure 'device.colour'"),
        ("device=2x", "has no figure 'device'"),
        ("link.inter_node=2x", "has no figure"),
        ("node.cores_count=2x", "has no figure"),
        ("device.achieved_bandwidth_fraction=3x", "above 1"),
        ("device.peak_flops_per_s=0", "would be 0"),
        ("device.memory_bytes=0x", "would be 0"),
    ],
)
def test_figures_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        changed(load_profile("h100-sxm"), text)


def test_a_profile_with_other_figures() -> None:
    profile = load_profile("h100-sxm")
    other = changed(
        profile,
        "link.inter_node.s_per_byte=0.5x,device.memory_bytes=1e11,device.peak_flops_per_s=2x",
    )
    assert other.link("inter_node").s_per_byte == profile.link("inter_node").s_per_byte / 2
    assert other.value("device.memory_bytes") == 1e11
    rates, faster = profile.rates_flops_per_s(), other.rates_flops_per_s()
    assert faster == {dtype: 2 * rate for dtype, rate in rates.items()}
    assert {k for k in profile.quantities if other.value(k) != profile.value(k)} == {
        "link.inter_node.s_per_byte", "device.memory_bytes",
        *(f"device.peak_flops_per_s.{d}" for d in (*rates, "tfloat32")),
    }  # fmt: skip
    assert "link.inter_node.s_per_byte=0.5x" in other.name


def test_what_a_profile_leaves_out_can_be_given() -> None:
    assert changed(load_profile("h100-sxm"), "node.cores_count=4").value("node.cores_count") == 4


@pytest.mark.parametrize("name", available_profiles())
def test_each_part_of_every_profile_can_be_doubled(name: str) -> None:
    profile = load_profile(name)
    for text in doublings(profile):
        assert changed(profile, text) != profile


def test_a_machine_twice_as_fast_takes_half_the_time(plan: autopar.Plan) -> None:
    other = plan.what_if(ALL_TWICE_AS_FAST)
    assert other.data is plan.data
    step_s = plan.simulate().step_time_s
    assert other.simulate().step_time_s == pytest.approx(step_s / 2, rel=1e-12)
    assert other.predicted.bubble == pytest.approx(plan.predicted.bubble, rel=1e-9)


def test_faster_parts_never_slow_a_step(plan: autopar.Plan) -> None:
    step_s = plan.predicted.step_time_s
    for text in doublings(load_profile("h100-sxm")):
        assert plan.what_if(text).predicted.step_time_s <= step_s
    slower = plan.what_if("link.inter_node.s_per_byte=100x").predicted
    assert slower.step_time_s > step_s
    assert slower.compute_time_s == plan.predicted.compute_time_s


def test_explicit_links_have_no_profile_to_change() -> None:
    device = autopar.Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e10)
    mesh = autopar.Mesh((1, 2), links=[autopar.Link(1e-6, 1e-10)] * 2, device=device)
    with pytest.raises(OptionError, match="no profile to change"):
        autopar.plan(Tiny(), mesh, batch(), stages=1).what_if("device.launch_s=2x")


@pytest.mark.parametrize("own", [{"chunk_s": 1e-7}, {"ratios": (("reduce_scatter", 2.0),)}])
def test_explicit_links_that_a_plan_cannot_record_are_refused(own: dict[str, Any]) -> None:
    device = autopar.Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e10)
    links = [autopar.Link(1e-6, 1e-10, **own)] * 2
    with pytest.raises(MeshError, match="cannot record explicit links with ratios or chunks"):
        autopar.plan(Tiny(), autopar.Mesh((1, 2), links=links, device=device), batch(), stages=1)


TINY = (
    "simulate", f"{__name__}:tiny", "--mesh", "2x1", "--hardware", "h100-sxm", "--stages",
    "up@1;down@1x1", "--microbatches", "2",
)  # fmt: skip


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="autopar")


def test_simulate_writes_what_it_draws(tmp_path: Path) -> None:
    drawing, trace = tmp_path / "step.svg", tmp_path / "step.json"
    words = ("--svg", str(drawing), "--trace", str(trace), "--scale")
    found = good(run(*TINY, *words, "--what-if", "device.launch_s=0x", "--json"))
    assert found["written"] == [str(drawing), str(trace)]
    assert drawing.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]
    assert [stage["name"] for stage in found["stages"]] == ["stage 0", "stage 1"]
    for stage in found["stages"]:
        parts = "compute_s collectives_s waited_s optimizer_s idle_s".split()
        assert sum(stage[part] for part in parts) == pytest.approx(found["step_time_s"])
        assert stage["peak_bytes"] > 0
    asked, *doubled = found["what_if"]
    assert asked["what_if"] == "device.launch_s=0x"
    assert asked["step_time_s"] < found["step_time_s"]
    assert [row["what_if"] for row in doubled] == list(doublings(load_profile("h100-sxm")))


def test_a_slow_stage_and_jitter_make_a_step_longer() -> None:
    plain = good(run(*TINY, "--json"))
    slow = good(run(*TINY, "--slow", "1:2.5", "--jitter", "0.2:7", "--json"))
    assert slow["step_time_s"] > plain["step_time_s"]
    assert slow["stages"][1]["compute_s"] > 2.5 * plain["stages"][1]["compute_s"]
    assert slow["stages"][0]["compute_s"] <= 1.2 * plain["stages"][0]["compute_s"]


def test_the_text_has_a_row_per_stage_and_machine() -> None:
    lines = run(*TINY, "--what-if", "link.inter_node.s_per_byte=0.5x").stdout.splitlines()
    assert lines[0].startswith("Tiny on 2 stages")
    assert [line.split()[0:2] for line in lines if line.startswith("stage ")] == [
        ["stage", "0"], ["stage", "1"],
    ]  # fmt: skip
    assert any(line.startswith("link.inter_node.s_per_byte=0.5x ") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--slow", "fast"), "STAGE:FACTOR"),
        (("--slow", "2:1.5"), "2 stages, counted from 0"),
        (("--slow", "0:0"), "STAGE:FACTOR"),
        (("--jitter", "0.1"), "FRACTION:SEED"),
        (("--what-if", "nothing"), "changes nothing"),
        (("--what-if", "abacus=2x"), "no figure"),
        (("--tp", "2"), "--tp: only for --scale"),
        (("--microbatch", "2", "--nodes", "1"), "--nodes, --microbatch: only for --scale"),
        (("--svg", "nowhere/step.svg"), "cannot write nowhere/step.svg"),
    ],
)
def test_wrong_use_of_simulate(words: tuple[str, ...], said: str) -> None:
    assert said in refused(run(*TINY, *words))


def test_a_plan_file_needs_its_model(tmp_path: Path, plan: autopar.Plan) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert f"autopar simulate {path} --model MODEL" in refused(run("simulate", str(path)))
    found = good(run("simulate", str(path), "--model", f"{__name__}:tiny", "--json"))
    assert found["step_time_s"] == plan.predicted.step_time_s
