"""The verdict: what a plan does by its placements, shares that add up, alternatives compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar import Manual, Mesh, Plan
from autopar.plans import Alternative, PlanSummary, parse_plan
from autopar.report.words.sentences import mean_shares, rounded_shares
from tests.helpers.jobs import CASES
from tests.helpers.nightly import nightly

GIB = 2**30


def planned(case: str, mesh: Any = (2, 2), **options: Any) -> Plan:
    job = CASES[case]
    if job.loss_fn is not None:
        options["loss_fn"] = job.loss_fn
    return autopar.plan(job.model(), mesh, job.batch(0), **options)


def compared(*others: Alternative, chosen: Alternative | None = None) -> list[str]:
    """What the verdict says of alternatives to a plan of 1 s."""
    plan = planned("mlp", manual=Manual(dp=4))
    own = chosen or Alternative("search on dp=4", 1.0)
    data = replace(plan.data, chosen=own.name, recipe="", alternatives=(own, *others))
    return replace(plan, data=data).verdict()[2:]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Manual(dp=4), "Data parallel over 4 devices, no recompute."),
        (Manual(dp=4, zero=1), "ZeRO-1 over 4 devices, no recompute."),
        (Manual(dp=4, zero=2), "ZeRO-2 over 4 devices, no recompute."),
        (Manual(dp=4, zero=3), "ZeRO-3 over 4 devices, no recompute."),
        (
            Manual(dp=2, tp=2),
            "Data parallel over 2 devices, all matmuls and the embedding split in two, "
            "no recompute.",
        ),
        (
            Manual(dp=2, tp=2, zero=3),
            "ZeRO-3 over 2 devices, all matmuls and the embedding split in two, no recompute.",
        ),
        (
            Manual(tp=4, sp=True),
            "All matmuls and the embedding split in four, sequence parallel, no recompute.",
        ),
        (Manual(pp=4), "Four stages of 1 device, no recompute."),
        (
            Manual(pp=2, tp=2),
            "Two stages of 2 devices, all matmuls and the embedding split in two, no recompute.",
        ),
    ],
)
def test_a_recipe_is_recognised_by_its_placements(recipe: Manual, words: str) -> None:
    assert planned("gpt2", manual=recipe).verdict()[0] == words


def test_names_are_not_read() -> None:
    """The same placements under another name have the same first sentence."""
    plan = planned("gpt2", manual=Manual(dp=4, zero=3))
    stages = tuple(
        replace(stage, axes={f"x{i}": n for i, n in enumerate(stage.axes.values())})
        for stage in plan.data.stages
    )
    renamed = replace(plan, data=replace(plan.data, chosen="Megatron", recipe="", stages=stages))
    assert renamed.verdict()[0] == plan.verdict()[0]


def test_one_device() -> None:
    assert planned("gpt2", (1, 1)).verdict()[0] == ("One device, nothing is sharded, no recompute.")


def test_devices_of_a_gpu_profile_are_gpus() -> None:
    mesh = Mesh((2, 2), hardware="a100-40gb")
    assert planned("gpt2", mesh, manual=Manual(dp=4)).verdict()[0] == (
        "Data parallel over 4 GPUs, no recompute."
    )


@pytest.mark.parametrize("recipe", [Manual(dp=4), Manual(pp=2, tp=2), Manual(pp=4)])
def test_shares_are_the_whole_step(recipe: Manual) -> None:
    plan = planned("gpt2", manual=recipe)
    step = plan.simulate()
    shares = mean_shares(step)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-12)
    assert shares["bubble"] == pytest.approx(plan.predicted.bubble, abs=1e-9)
    ranks = sum(device.n_ranks for device in step.devices)
    compute_s = sum(device.n_ranks * device.compute_s for device in step.devices) / ranks
    assert shares["compute"] * plan.predicted.step_time_s == pytest.approx(compute_s)
    printed = plan.verdict()[1].partition(";")[0]
    numbers = [int(word.rstrip("%,")) for word in printed.split() if "%" in word]
    assert sum(numbers) == 100 and 0 not in numbers


def test_percentages_add_up() -> None:
    thirds = dict.fromkeys("abc", 1 / 3)
    assert sum(rounded_shares(thirds).values()) == 100
    assert rounded_shares({"a": 0.996, "b": 0.004}) == {"a": 100, "b": 0}
    assert rounded_shares({}) == {}


def test_memory_of_the_limit() -> None:
    recipe = Manual(dp=4)
    limited = planned("gpt2", manual=recipe, memory_limit=2 * GIB)
    assert limited.verdict()[1].endswith("KiB of 2.0 GiB.")
    assert parse_plan(limited.data.to_json()).limit_bytes == 2 * GIB
    mesh = Mesh((2, 2), hardware="a100-40gb")
    whole = planned("gpt2", mesh, manual=recipe)
    assert whole.bound is not None
    assert whole.data.limit_bytes == whole.bound.hardware.memory_limit_bytes
    half = planned("gpt2", mesh, manual=recipe, memory_margin=0.5)
    assert half.data.limit_bytes == 0.5 * whole.bound.hardware.device.memory_bytes
    tight = replace(limited, data=replace(limited.data, limit_bytes=1024.0))
    assert "more than the limit of 1.0 KiB" in tight.verdict()[1]


def test_the_fastest_simple_plan_is_compared() -> None:
    fast = Alternative("ZeRO-3 on dp=4", 1.012, recipe="ZeRO-3")
    slow = Alternative("Megatron on tp=4", 1.4, recipe="Megatron")
    better, within = compared(slow, fast)
    assert better == "1.2% faster than the best simple plan, plain ZeRO-3."
    assert within.startswith("That is within the error of predictions")
    slower = replace(fast, step_time_s=0.96)
    assert compared(slower) == ["4.2% slower than the best simple plan, plain ZeRO-3."]
    guess = replace(fast, step_time_s=1.3, is_estimate=True)
    ruled_out = Alternative("Megatron of several stages", None, "", "Megatron", least_s=1.2)
    words = "About 30% faster than the best simple plan tried, plain ZeRO-3."
    assert compared(ruled_out, guess) == [words]
    assert compared(ruled_out) == ["Every simple plan takes at least 1.2 s, or does not fit."]
    assert compared(slow) == ["40% faster than the best simple plan, Megatron on tp=4."]
    far = Alternative("data parallel on dp=4", 3.0, recipe="data parallel")
    assert compared(far) == ["3 times as fast as the best simple plan, plain data parallelism."]
    equal = replace(fast, step_time_s=1.001)
    assert compared(equal)[0] == "As fast as the best simple plan, plain ZeRO-3."


def test_a_gain_within_the_error_of_predictions_is_called_so() -> None:
    """What it needs, what the simple plan takes, and the option that chooses that."""
    plan = planned("mlp", Mesh((1, 4), hardware="a100-80gb"), manual=Manual(dp=4))
    own = Alternative("search on dp=4", 1.0)
    sent = PlanSummary({}, {"all_gather over dp": 1.0}, {})

    def said_of(simple_s: float, is_estimate: bool = False) -> list[str]:
        simple = Alternative(
            "ZeRO-3 on dp=4", simple_s, recipe="ZeRO-3", summary=sent, is_estimate=is_estimate
        )
        data = replace(plan.data, chosen=own.name, recipe="", alternatives=(own, simple))
        return replace(plan, data=data).verdict()[3:]

    n_calls = sum(call.count for call in plan.collectives())
    n_kinds = len({(call.kind, call.axes_text) for call in plan.collectives()})
    assert said_of(1.022) == [
        "That is within the error of predictions between plans, 4.8% for half of published pairs: "
        f"it needs {n_calls} calls of {n_kinds} kind of collectives, the simple plan 1 kind. "
        "tie=0.03 chooses that: 1.02 s."
    ]
    assert said_of(1.05) == said_of(0.99) == []
    (estimated,) = said_of(1.015, is_estimate=True)
    assert estimated.endswith("That is estimated, not simulated: 1.01 s.")
    words = "data", "tensor", "sequence", "pipeline"
    plan = planned("mlp", Mesh((1, 4), hardware="a100-80gb"), forbid=words)
    assert not plan.collectives()
    assert "it needs no collectives, the simple plan 1 kind." in said_of(1.022)[0]


def test_no_simple_plan_fits() -> None:
    big = Alternative("ZeRO-3 on dp=4", None, "", "ZeRO-3", 90 * GIB)
    bigger = Alternative("data parallel on dp=4", None, "", "data parallel", 300 * GIB)
    assert compared(bigger, big) == ["No simple plan fits: plain ZeRO-3 needs 90.0 GiB."]


def test_without_simple_plans_nothing_is_compared() -> None:
    assert compared(Alternative("search on tp=4", 1.5)) == []


def test_the_plan_is_a_simple_one() -> None:
    own = Alternative("ZeRO-3 on dp=4", 1.0, recipe="ZeRO-3")
    assert compared(chosen=own) == ["It is plain ZeRO-3: the search found nothing faster."]
    rest = Alternative("the rest", None, "not tried when time_limit_s=60 had passed")
    assert compared(rest, chosen=own) == [
        "It is plain ZeRO-3: the search found nothing faster in its time."
    ]
    faster = Alternative("search on dp=4", 0.986)
    assert compared(faster, chosen=own) == [
        "It is plain ZeRO-3, 1.4% slower than the fastest plan found."
    ]
    said = planned("mlp", manual=Manual(dp=4)).verdict()
    assert said[2] == "It is the user's recipe: nothing else was tried."


@nightly
def test_the_search_records_recipes_and_what_they_need() -> None:
    plan = planned("gpt2")
    recipes = {a.recipe for a in plan.data.alternatives}
    of_one_axis = {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"}
    assert recipes == {"", "Megatron", "HSDP", "FSDP x TP"} | of_one_axis
    assert parse_plan(plan.data.to_json()) == plan.data
    tight = planned("gpt2", memory_limit=600 * 1024, recompute="none", microbatches=1)
    unfit = [a for a in tight.data.alternatives if a.step_time_s is None and a.peak_bytes]
    assert "data parallel" in {a.recipe for a in unfit}
    assert all(a.peak_bytes and a.peak_bytes > 600 * 1024 for a in unfit)


def test_explain_begins_with_the_verdict() -> None:
    plan = planned("gpt2", manual=Manual(dp=4))
    assert plan.explain().split("\n\n")[0].splitlines() == plan.verdict()
