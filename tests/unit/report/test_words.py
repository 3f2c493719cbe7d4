"""Words of reports: equal layers as ranges, why alternatives lost, what tables abbreviate."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar import Manual, Mesh, Plan, PlanError
from autopar.plans import Alternative, parse_plan
from autopar.program.lines import starred
from autopar.report import folded_names
from autopar.report.blocks import block_set, range_text
from autopar.report.tables import alternative_note, parameter_rows
from autopar.report.words.legend import legend
from tests.helpers.jobs import CASES, gpt2
from tests.helpers.nightly import nightly
from tests.helpers.plans import pipeline_of, program_of

GIB = 2**30


def planned(n_layers: int = 2, mesh: Any = (2, 2), **options: Any) -> Plan:
    return autopar.plan(gpt2(n_layers), mesh, CASES["gpt2"].batch(0), **options)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0,), "0"),
        ((0, 1), "0, 1"),
        ((0, 1, 2), "0 to 2"),
        ((0, 27, 28, 29, 31), "0, 27 to 29, 31"),
    ],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert range_text(numbers) == text


def test_blocks_as_words() -> None:
    every = block_set(f"h.{i}.mlp" for i in range(80)).blocks
    assert block_set(f"h.{i}.attn" for i in range(80)).text(every) == "all 80 blocks"
    assert block_set(f"h.{i}" for i in range(40)).text(every) == "blocks 0 to 39 of 80 (h.*)"
    assert block_set(["h.3.mlp", "ln_f"]).text(every) == "block 3 of 80 (h.*), ln_f"
    both = block_set(["enc.0", "enc.1", "dec.0", "dec.1"]).blocks
    assert block_set(["enc.0", "enc.1"]).text(both) == "all 2 blocks (enc.*)"
    assert block_set(["enc.0", "enc.1", "dec.0", "dec.1"]).text(both) == "all 4 blocks"


def test_only_numbers_of_modules_are_starred() -> None:
    assert starred("h.3.mlp.c_fc.weight") == "h.*.mlp.c_fc.weight"
    assert starred("0.weight") == "*.weight" and starred("net.12") == "net.*"
    assert starred("dim 0 of 61 over 4 ranks") == "dim 0 of 61 over 4 ranks"
    assert starred("h.0.ln_1/add#1") == "h.*.ln_1/add#1"
    found = folded_names([("h.0.w", "I"), ("h.1.w", "I"), ("h.2.w", "R")])
    assert found == [("h.*.w (2)", "I"), ("h.2.w", "R")]


def test_recomputed_blocks_are_ranges() -> None:
    text = planned(6, manual=Manual(dp=4), recompute="full").explain()
    assert "runs again in backward: 6 in mode full: all 6 blocks\n" in text
    text = planned(6, manual=Manual(pp=2, dp=2), recompute="full").explain()
    assert "stage 0, 3 in mode full: blocks 0 to 2 of 6 (transformer.h.*)\n" in text


def test_comments_of_equal_layers_are_one() -> None:
    plan = planned(manual=Manual(dp=4))
    comments = {f"h.{i}.w": f"dim 0 of 61 meets h.{i}/softmax" for i in range(80)}
    data = replace(plan.data, comments=comments | {"ln.w": "alone"})
    text = replace(plan, data=data).explain()
    assert "\nh.*.w (80 parameters): dim 0 of 61 meets h.*/softmax\nln.w: alone\n" in text


def note_of(*others: Alternative) -> list[str]:
    """What is said of alternatives to a plan of 1 s and 72 GiB."""
    data = replace(
        planned(manual=Manual(dp=4)).data,
        chosen="own", limit_bytes=72.0 * GIB, alternatives=(Alternative("own", 1.0), *others),
    )  # fmt: skip
    return [alternative_note(a, data) for a in data.alternatives]


def test_why_alternatives_lost() -> None:
    found = note_of(
        Alternative("a", 1.12, slower_by="all_reduce across nodes"),
        Alternative("b", 1.123, is_estimate=True),
        Alternative("c", 1.0125, slower_by="bubble"),
        Alternative("d", 2.5, is_estimate=True, slower_by="recompute"),
        Alternative("e", 1.0001),
        Alternative("f", None, least_s=13.4),
        Alternative("g", None, peak_bytes=91.0 * GIB),
        Alternative("h", None, "said so"),
        Alternative("i", 0.8),
        Alternative("j", 0.8, is_estimate=True),
    )
    assert found == [
        "", "slower by 12%: all_reduce across nodes", "slower by about 12%",
        "slower by 1.2%: bubble", "takes about 2.5 times as long: recompute", "as fast",
        "ruled out: at least 13.4 s", "does not fit: needs 91.0 of 72.0 GiB", "said so",
        "faster by 20%, not as simple", "faster by about 20%, an estimate: it was not simulated",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Plan:
    return planned(mesh=Mesh((2, 2), hardware="cpu-local"))


@nightly
def test_every_alternative_says_why(found: Plan) -> None:
    rows = found.data.alternatives
    assert all(alternative_note(a, found.data) for a in rows if a.name != found.data.chosen)
    assert "not simulated" not in found.explain()
    explained = {a.name: a for a in rows if a.summary is not None}
    assert len(explained) >= 3 and {a.is_estimate for a in explained.values()} == {True, False}
    assert explained["ZeRO-1 on dp=4 x tp=1"].slower_by == "all_reduce across nodes"


@nightly
def test_the_record_keeps_what_the_search_knows(found: Plan) -> None:
    assert parse_plan(found.data.to_json()) == found.data
    simulated = [a for a in found.data.alternatives if a.step_time_s and not a.is_estimate]
    assert simulated and all(a.peak_bytes for a in simulated)
    raw = json.loads(found.data.to_json())
    for row in raw["alternatives"]:
        for key in ("recipe", "peak_bytes", "least_s", "is_estimate", "slower_by"):
            del row[key]
    del raw["limit_bytes"]
    old = parse_plan(json.dumps(raw))
    assert [a.name for a in old.alternatives] == [a.name for a in found.data.alternatives]
    assert old.limit_bytes is None and old.stages == found.data.stages
    raw["alternatives"][0]["least_s"] = "soon"
    with pytest.raises(PlanError, match=r"alternatives\[0\].least_s is 'soon'"):
        parse_plan(json.dumps(raw))


@nightly
def test_a_limited_search_says_what_does_not_fit() -> None:
    plan = planned(memory_limit=600 * 1024, recompute="none", microbatches=1)
    assert "does not fit: needs " in plan.explain() and " of 600.0 KiB" in plan.explain()


def lines(plan: Plan) -> list[str]:
    return [line.partition("  ")[0] for line in legend(pipeline_of(plan)).splitlines()]


def test_the_legend_has_what_occurs() -> None:
    assert lines(planned(manual=Manual(dp=4))) == ["*", "R", "I"]
    assert lines(planned(manual=Manual(dp=4, zero=2))) == ["*", "S(d)", "R", "I", "micro"]
    zero3 = planned(manual=Manual(dp=4, zero=3))
    assert "each use" in lines(zero3) and "micro" not in lines(zero3)
    assert legend(pipeline_of(zero3)) in zero3.explain()


def test_the_legend_explains_an_order() -> None:
    plan = planned(manual=Manual(dp=2, tp=2, zero=3))
    program = program_of(plan)
    first, *rest = program.parameters
    spec = autopar.placement.Spec.parse("S(0) S(0) order 1,0")
    first = replace(first, stored=replace(first.stored, spec=spec))
    program = replace(program, parameters=(first, *rest))
    text = legend(replace(pipeline_of(plan), stages=(program,)))
    assert text.splitlines()[-1] == "order 1,0  tp cuts the dim first, then dp"


def test_rows_of_one_pattern_say_their_blocks() -> None:
    program = program_of(planned(4, manual=Manual(dp=4, zero=3)))

    def changed(name: str) -> bool:
        return name in ("transformer.h.0.ln_1.weight", "transformer.h.3.ln_1.weight")

    parameters = tuple(
        replace(p, stored=replace(p.stored, spec=autopar.placement.Spec.parse("I")))
        if changed(p.name) else p
        for p in program.parameters
    )  # fmt: skip
    rows = parameter_rows(replace(program, parameters=parameters))
    found = {(r.count, r.blocks) for r in rows if r.pattern == "transformer.h.*.ln_1.weight"}
    assert found == {(2, "blocks 0, 3"), (2, "blocks 1, 2")}
    assert all(not r.blocks for r in rows if r.pattern != "transformer.h.*.ln_1.weight")


def test_mfu_names_its_peak() -> None:
    mesh = Mesh((1, 2), hardware="h100-sxm")
    assert "% of 66.9 TFLOP/s" in planned(mesh=mesh, manual=Manual(dp=2)).explain()
