"""The facts of a page: sums that must hold, what a browser is given, a bundle that is fresh."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import Manual, Mesh, OptionError, Plan
from autopar.cost.price import layer_works, step_shares
from autopar.passes.explain import decisions, runners_up
from autopar.plans import MANUAL, Alternative
from autopar.program.lines import starred
from autopar.report.page import page_html
from autopar.report.picture import fold, picture
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly
from tests.helpers.page import page_facts
from tests.helpers.plans import bound_of, pipeline_of

WEB = Path(autopar.__file__).parent / "report" / "page" / "web"


def gpt2(n_layers: int = 4, **options: Any) -> Plan:
    config = AutoConfig.for_model(
        "gpt2", n_layer=n_layers, n_embd=64, n_head=4, vocab_size=256, n_positions=32
    )
    ids = torch.zeros(8, 32, dtype=torch.int64)
    model, mesh = AutoModelForCausalLM.from_config(config), Mesh((1, 4), hardware="a100-80gb")
    return autopar.plan(model, mesh, {"input_ids": ids, "labels": ids}, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "search": {},
    "zero3": {"manual": Manual(dp=4, zero=3)},
    "stages": {"stages": 2, "microbatches": 4},
    "chunks": {"manual": Manual(pp=2, dp=2, interleave=2, microbatch_size=1)},
    "zero bubble": {"manual": Manual(pp=4, microbatch_size=2), "schedule": "zero-bubble"},
    "V": {"manual": Manual(pp=2, tp=2, microbatch_size=2), "schedule": "zero-bubble-v"},
    "recompute": {"manual": Manual(tp=2, dp=2), "recompute": "full", "microbatches": 2},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(o, marks=nightly) if o == "search" else o for o in OPTIONS],
)
def plan(request: pytest.FixtureRequest) -> Plan:
    return gpt2(**OPTIONS[request.param])


@pytest.fixture(scope="module")
def facts(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan.to_json(replan=False))
    return found


def test_the_parts_add_up_to_the_step_and_the_peak(plan: Plan, facts: dict[str, Any]) -> None:
    shares = step_shares(pipeline_of(plan), bound_of(plan).costs, plan.simulate())
    parts = [part["time_s"] for part in facts["time"]["parts"]]
    assert math.fsum(parts) == pytest.approx(plan.predicted.step_time_s, rel=1e-8)
    assert min(parts) > 0 and facts["time"]["step_time_s"] == plan.predicted.step_time_s
    exposed = [s.time_s for s in shares.parts if "collective" in s.kind or s.kind == "wait"]
    assert math.fsum(exposed) == pytest.approx(plan.predicted.exposed_comm_s, rel=1e-6)
    totals = plan.simulate().devices[shares.device]
    hidden = math.fsum(share.time_s for share in shares.hidden)
    assert hidden == pytest.approx(totals.hidden_s, rel=1e-6, abs=1e-12)
    sizes = [part["size_bytes"] for part in facts["memory"]["parts"]]
    assert math.fsum(sizes) == pytest.approx(plan.predicted.peak_bytes) and min(sizes) > 0


def test_live_memory_rises_to_the_peak_and_falls(plan: Plan, facts: dict[str, Any]) -> None:
    """Every moment of `peak_memory`, by kind; activations go in backward."""
    kinds, peaks = facts["live"]["kinds"], plan.predicted.peak_bytes_per_stage
    schedule = pipeline_of(plan).schedule
    is_plain = schedule.n_chunks == 1 and not schedule.splits_backward
    for device in facts["live"]["devices"]:
        (peak_bytes,) = {peaks[stage] for stage in device["stages"]}
        assert device["peak"][0] == peak_bytes
        held_bytes = math.fsum(row[3] for row in device["held"])
        assert held_bytes <= peak_bytes * (1 + 1e-9)
        assert held_bytes >= 0.98 * peak_bytes or is_plain  # there a row is all of a kind
    for stage, peak_bytes in zip(facts["live"]["stages"], peaks, strict=True):
        phases = stage["phases"]
        names = [name for name, *_ in phases]
        assert ("weights" in names) == schedule.splits_backward
        shown = [sum(sizes) for _, points, *_ in phases for _, sizes, _ in points]
        assert max(shown) == pytest.approx(peak_bytes) or not is_plain
        for _, points, left, _ in phases:
            shares = [share for share, *_ in points]
            assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
            assert min(left) >= 0 and min(min(sizes) for _, sizes, _ in points) >= 0
        (_, _, before, _), (_, _, kept, others) = phases[:2]
        _, _, left, others_later = phases[3 if schedule.splits_backward else 2]
        assert sum(kept) - others - sum(before) == pytest.approx(stage["kept"])
        at = kinds.index("activations")
        assert left[at] - others_later < 0.01 * (kept[at] - others)


def test_layers_add_up_to_the_actions(plan: Plan) -> None:
    bound, stages = bound_of(plan), plan.simulate().record.stages
    n_blocks = min(2, 4 // len(stages))
    for program, cost, times in zip(bound.pipeline.stages, bound.costs, stages, strict=True):
        assert tuple(layer_works(program, cost)) == bound.pipeline.schedule.computes()
        for kind, works in layer_works(program, cost).items():
            part = times.of(kind)
            conversions_s = part.compute_s - math.fsum(w.compute_s for w in works)
            assert -1e-15 < conversions_s <= 0.2 * part.compute_s  # of gradients brought back
            assert math.fsum(w.waited_s for w in works) == pytest.approx(part.collectives_s)
            assert math.fsum(w.overlapped_s for w in works) == pytest.approx(part.overlapped_s)
            layers = [w.layer for w in works]
            assert len(set(layers)) == len(layers)
            assert sum(layer.startswith("transformer.h.") for layer in layers) >= n_blocks


def test_the_graph_has_the_edges_of_the_picture(plan: Plan, facts: dict[str, Any]) -> None:
    """The page folds blocks by rules of its own; they must be those of `folding.py`."""
    for program, stage in zip(pipeline_of(plan).stages, facts["stages"], strict=True):
        sections, edges = fold(picture(program))
        folded = {n for s in sections for copy in s.copies[1:] for n in copy}
        last = {a: b for s in sections for a, b in zip(s.copies[-1], s.nodes, strict=True)}
        drawn = {
            (last.get(source, source), target, value)
            for source, target, value, _ in stage["edges"]
            if target not in folded and (source not in folded or source in last)
        }
        assert drawn == {(e.source, e.target, e.value) for e in edges}
        assert {int(n) for n in stage["details"]} == {n for s in sections for n in s.nodes}
        seconds = [d["forward_s"] + d["backward_s"] for d in stage["details"].values()]
        assert max(seconds) > 0


def test_generated_lines_are_of_the_module(facts: dict[str, Any]) -> None:
    n_found = 0
    for stage in facts["stages"]:
        for detail in stage["details"].values():
            if place := detail["generated"]:
                heading = facts["code"][place["file"]].splitlines()[place["line"] - 1]
                assert starred(detail["module"]) == starred(heading.split()[1])
                n_found += 1
    assert n_found > 5


@nightly
def test_runners_up_are_those_of_each_decision() -> None:
    """Of a program without blocks to fold, where both price the same problem."""
    plan = gpt2(2)
    stages = bound_of(plan).stages
    (found,) = runners_up(stages, plan.data)
    for name in ("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"):
        (decision,) = decisions(stages, plan.data, name)
        assert decision.choice is not None
        assert [o.extra_s for o in found[name]] == pytest.approx(
            [o.extra_s for o in decision.choice.others], rel=1e-6, abs=1e-12
        )
    assert len(found) > 100
    assert runners_up(stages, replace(plan.data, recipe=MANUAL)) == [{}]


@nightly
def test_what_helps_is_what_it_would_be() -> None:
    plan = gpt2(1)
    facts = json.loads(plan.to_json())
    rows = {row["what"]: row for row in facts["choices"] + facts["machine"]}
    for row in rows.values():
        if "what_if" in row["command"]:
            change = row["command"].split('"')[1]
            assert row["step_time_s"] == plan.what_if(change).simulate().step_time_s
    assert "links between nodes twice as fast" not in rows
    assert rows["half the memory"]["gain"] == 0.0
    assert rows["twice the nodes, same batch"]["step_time_s"] <= plan.predicted.step_time_s
    tight = gpt2(1, memory_limit=int(plan.predicted.peak_bytes * 1.05))
    row = {row["what"]: row for row in json.loads(tight.to_json())["machine"]}["half the memory"]
    assert "the plan needs" in row["note"] or "no plan fits" in row["note"]
    quick = {row["what"]: row for row in json.loads(tight.to_json(replan=False))["machine"]}
    assert quick["half the memory"]["step_time_s"] is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"microbatches": 2, "memory_limit": 40 * 2**30, "forbid": ["tensor"]}, marks=nightly
        ),
        {"manual": Manual(dp=2, tp=2, sp=True, zero=1), "reduce_dtype": None},
        {"force": {"transformer.wte.weight": "S(0)@0"}, "mesh_shape": {"dp": 4, "tp": 1}},
    ],
)
def test_python_that_is_printed_runs(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It plans the same again, and what every row says."""
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=64, n_head=4, vocab_size=256)
    ids = torch.zeros(8, 32, dtype=torch.int64)
    names: dict[str, Any] = {
        "autopar": autopar, "model": AutoModelForCausalLM.from_config(config),
        "example_inputs": {"input_ids": ids, "labels": ids},
    }  # fmt: skip
    mesh = Mesh((1, 4), hardware="a100-80gb")
    names["plan"] = autopar.plan(names["model"], mesh, names["example_inputs"], **options)
    facts = json.loads(names["plan"].to_json(replan=False))
    exec(facts["command"].replace("print(", "again = (", 1), names)
    assert names["again"].data.to_json() == names["plan"].data.to_json()
    for row in facts["choices"] + facts["machine"]:
        exec(row["command"], names)
    assert capsys.readouterr().out


@nightly
def test_every_bound_plan_has_facts(tmp_path: Path) -> None:
    """Loaded, on a machine given as numbers, on a changed machine, of one axis."""
    model, link = Tiny(), autopar.Link(latency_s=1e-6, s_per_byte=1e-10)
    device = autopar.Device(flops_per_s=1e13, bytes_per_s=1e12, memory_bytes=1e10)
    plan = autopar.plan(model, Mesh((4,), links=[link], device=device), batch())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json").bind(model)
    changed = autopar.plan(model, (1, 2), batch()).what_if("device.peak_flops_per_s=2x")
    for each in (plan, loaded, changed):
        facts = json.loads(each.to_json())
        rows = {row["what"]: row for row in facts["choices"] + facts["machine"]}
        assert not any("what-if" in row["command"] for row in rows.values())
        doubled = rows[
            "twice the nodes, same batch" if each is changed else "twice the devices, same batch"
        ]
        assert doubled["step_time_s"] is not None or doubled["note"]


@nightly
def test_alternatives_are_summed_up(tmp_path: Path) -> None:
    """Of the fastest, the summary adds up to the step; that of a plan on few blocks is its own."""
    plan = gpt2(6)
    rows = json.loads(plan.to_json(replan=False))["alternatives"]
    for row in rows:
        if row["summary"] is not None and not row["is_estimate"]:
            assert sum(row["summary"]["times_s"].values()) == pytest.approx(row["step_time_s"])
    (own,) = [row for row in rows if row["chosen"]]
    assert "transformer.h.*.mlp.c_fc.weight" in own["summary"]["parameters"]
    recorded = [row for row in plan.data.alternatives if row.summary is not None]
    assert len(recorded) >= 2 and all(row["why"] for row in rows if not row["chosen"])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").data.alternatives == plan.data.alternatives


def test_predicted_is_the_plans(plan: Plan, facts: dict[str, Any]) -> None:
    assert facts["predicted"] == json.loads(json.dumps(asdict(plan.predicted)))
    assert tuple(facts["interval_s"]) == plan.predicted.interval_s
    assert facts["verdict"] == plan.verdict()
    calls = sum(row["calls"] for row in facts["collectives"])
    assert calls == sum(c.count for c in plan.collectives())
    n_stored = sum(len(program.parameters) for program in pipeline_of(plan).stages)
    assert sum(row["count"] for row in facts["parameters"]) == n_stored


def test_alternatives_within_the_error_are_marked() -> None:
    """Slower or faster by less than predictions err, as the verdict says; nowhere else."""
    steps_s = {"own": 1.0, "slower": 1.04, "faster": 0.96, "slow": 1.05, "fast": 0.95, "none": None}
    rows = tuple(Alternative(name, step_s) for name, step_s in steps_s.items())

    def marked(mesh: Mesh) -> list[str]:
        made = autopar.plan(Tiny(), mesh, batch(), manual=Manual(dp=4))
        data = replace(made.data, chosen="own", recipe="", alternatives=rows)
        facts = json.loads(Plan(data).bind(Tiny()).to_json(replan=False))
        return [row["name"] for row in facts["alternatives"] if row["within_error"]]

    assert marked(Mesh((1, 4), hardware="a100-80gb")) == ["slower", "faster"]
    assert marked(machine((1, 4))) == []


def test_a_page_loads_nothing_and_keeps_names_inert() -> None:
    """A hostile name stays text: no `<` of it is in the page."""
    evil = '</script><script>"x"&\ud800'
    text = page_html(evil.encode("ascii", "replace").decode(), json.dumps({"model": evil}))
    assert page_facts(text) == {"model": evil}
    assert text.count("<script") == 2 and text.count("</script") == 2
    assert not re.search(r"<(link|img|iframe|object)\b|\bsrc=\"|@import", text.split("<main")[0])


def test_files_of_a_report(tmp_path: Path) -> None:
    made = autopar.plan(Tiny(), (2, 2), batch(), manual=Manual(dp=2, tp=2))
    files = made.report(tmp_path / "page.html", replan=False)
    assert page_facts(files.page.read_text())["model"] == "Tiny"
    assert files.dot.read_text() == made.to_dot()
    with pytest.raises(OptionError, match="cannot write"):
        made.report(tmp_path / "nowhere" / "page.html", replan=False)
    with pytest.raises(OptionError, match="own graph"):
        made.report(tmp_path / "a.dot", replan=False)


def test_the_bundle_is_that_of_the_sources() -> None:
    """`npm ci && npm run build` in autopar/report/page/web makes it anew."""
    names = ["package-lock.json", "build.mjs", *sorted(f"src/{f.name}" for f in WEB.glob("src/*"))]
    hashed = sha256()
    for name in names:
        hashed.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    for name in ("page.js", "page.css"):
        head = (WEB / "bundle" / name).read_text(encoding="utf-8").splitlines()[0]
        assert f"sources {hashed.hexdigest()}" in head
    script = (WEB / "bundle" / "page.js").read_text(encoding="utf-8")
    licences = (WEB / "bundle" / "LICENSES.txt").read_text(encoding="utf-8")
    for library in ("@viz-js/viz", "@observablehq/plot", "d3-zoom"):
        assert re.search(rf"^ \* {library} [\d.]+, (ISC|MIT)$", script[:4000], re.MULTILINE)
        assert f"{library} " in licences
