"""Schedules: which one a plan has, and plans with several stages a rank as data and as objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import autopar
from autopar import Manual
from autopar.errors import InfeasibleError, OptionError, PlanError
from autopar.options import Options
from autopar.passes.search import Solved
from autopar.plans import parse_plan
from autopar.schedule import CHUNKS
from autopar.units import format_bytes
from tests.helpers.every_plan import choices_of
from tests.helpers.harness import Mlp, random_rows
from tests.helpers.machines import SLOW

MESH = (1, 4)


def planned(**options: Any) -> autopar.Plan:
    given = {"microbatches": 8} | options
    return autopar.plan(Mlp(n_layers=8), MESH, random_rows(0, "x", "y"), **given)


@pytest.mark.parametrize(
    ("word", "ranks"),
    [
        ("interleaved", [0, 1, 0, 1]),
        ("zero-bubble", [0, 1, 2, 3]),
        ("zero-bubble-v", [0, 1, 1, 0]),
        ("dualpipe-v", [0, 1, 1, 0]),
    ],
)
def test_a_stage_is_a_chunk(word: str, ranks: list[int]) -> None:
    """`plan.stages` lists all of them, with their ranks; a plan file keeps them."""
    n_devices = len(set(ranks))
    each = 4 // n_devices
    manual = Manual(dp=each, pp=n_devices, interleave=len(ranks) // n_devices)
    plan = planned(manual=manual, schedule=word)
    again = parse_plan(plan.data.to_json())
    firsts = [device * each for device in ranks]
    assert plan.schedule == word
    assert [stage.ranks for stage in plan.stages] == [
        tuple(range(first, first + each)) for first in firsts
    ]
    assert again == plan.data and list(again.first_ranks) == firsts
    modules = [module for stage in plan.stages for module in stage.modules]
    assert modules[0] == "net.0"


@pytest.mark.parametrize("word", [w for w in CHUNKS if w not in ("gpipe", "1f1b")])
def test_a_search_of_one_schedule(word: str) -> None:
    """So many stages: which views and placements, the search decides."""
    plan = planned(schedule=word, stages=4)
    assert plan.schedule == word and len(plan.stages) == 4
    assert plan.bound is not None
    assert plan.bound.pipeline.schedule.n_chunks == CHUNKS[word][0]


def chosen(**options: Any) -> Solved:
    """Two devices whose messages take as long as matmuls, and two microbatches."""
    asked = Options.of(microbatches=2, recompute="none", **options)
    return choices_of("mlp", (2,), SLOW, asked).planned().solved


def test_auto_is_another_schedule_if_that_is_faster_by_more_than_the_tie() -> None:
    """Of plans within the tie, one in the plain order is the simplest."""
    plain, found, within = chosen(schedule="1f1b"), chosen(), chosen(tie=0.4)
    assert found.candidate.schedule in ("interleaved", "zero-bubble", "zero-bubble-v")
    assert found.step_time_s * 1.02 < plain.step_time_s
    assert within.candidate.schedule == "1f1b"
    assert within.step_time_s <= found.step_time_s * 1.4


def test_one_stage_has_no_use_for_another_schedule() -> None:
    assert planned(schedule="zero-bubble-v", stages=1).schedule == "1f1b"


def test_stages_of_a_rank_share_its_memory() -> None:
    """Less than they need is refused by what a rank has, not by what one stage has of it."""
    manual = Manual(pp=2, dp=2, interleave=2)
    peak_bytes = planned(manual=manual).predicted.peak_bytes
    enough = planned(memory_limit=1.01 * peak_bytes, manual=manual)
    assert enough.predicted.peak_bytes == peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        planned(memory_limit=0.9 * peak_bytes, manual=manual)
    assert f"no plan fits in {format_bytes(0.9 * peak_bytes)} per device" in str(caught.value)


MODULES = [("net.0 net.1".split(), 2), ("net.2 net.3".split(), 2)]
# Options, what is wrong, and the way out.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "nothing to interleave": (
        {"manual": Manual(pp=2, dp=2), "schedule": "interleaved"},
        "Manual.interleave=1. with schedule='interleaved'",
        "interleave=2 or more",
    ),
    "too many for a V": (
        {"manual": Manual(pp=2, dp=2, interleave=3), "schedule": "zero-bubble-v"},
        "Manual.interleave=3. with schedule='zero-bubble-v'",
        "interleave=2,",
    ),
    "one stage a rank": (
        {"manual": Manual(pp=2, dp=2, interleave=2), "schedule": "1f1b"},
        "Manual.interleave=2. with schedule='1f1b'",
        "interleave=1",
    ),
    "more stages than layers": (
        {"manual": Manual(pp=4, interleave=40)},
        "Manual.pp=4, interleave=40.: the model can be cut into",
        "fewer stages",
    ),
    "too few microbatches": (
        {"manual": Manual(pp=4), "schedule": "dualpipe-v", "microbatches": 4},
        "4 microbatches",
        "8",
    ),
    "stages of modules": (
        {"stages": MODULES, "schedule": "interleaved"},
        "schedule='interleaved' has equal stages",
        "a number of stages",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    options, what, way_out = REFUSED[case]
    with pytest.raises(OptionError, match=what) as caught:
        planned(**options)
    assert way_out in (caught.value.hint or "")


def test_interleaved_stages_need_stages() -> None:
    with pytest.raises(OptionError, match="pp=1") as caught:
        Manual(dp=4, interleave=2)
    assert "pp > 1" in (caught.value.hint or "")


# What is done to the file, and the error.
DAMAGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a stage less": (lambda raw: raw["stages"].pop(), "stages hold"),
    "another schedule": (lambda raw: raw.update(schedule="1f1b"), "stages hold"),
    "other axes": (
        lambda raw: raw["stages"][2].update(axes={"dp": 1, "tp": 2}),
        "stages.2. has other axes",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str) -> None:
    damage, what = DAMAGED[case]
    raw = json.loads(planned(manual=Manual(pp=2, dp=2, interleave=2)).data.to_json())
    damage(raw)
    with pytest.raises(PlanError, match=what):
        parse_plan(json.dumps(raw))
