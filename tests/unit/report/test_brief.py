"""The plan on one screen: `print(plan)`, its `repr`, and what a notebook shows."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

import autopar
from autopar import Manual, Mesh, Plan
from autopar.plans import Alternative

ON_GPUS = Mesh((1, 4), hardware="a100-80gb")


def planned(mesh: Mesh = ON_GPUS, dtype: torch.dtype = torch.float32) -> Plan:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(dtype)
    x = torch.empty(64, 64, dtype=dtype)
    return autopar.plan(model, mesh, (x,), loss_fn=lambda outputs, batch: outputs.square().mean())


def rows_of(plan: Plan) -> dict[str, list[str]]:
    """Label -> its texts."""
    found: dict[str, list[str]] = {}
    label = ""
    for line in str(plan).partition("\n\n")[2].splitlines():
        label = line[:9].strip() or label
        found.setdefault(label, []).append(line[10:])
    return found


def test_a_plan_is_printed_on_one_screen() -> None:
    plan = planned()
    assert str(plan).split("\n\n")[0].splitlines() == plan.verdict()
    assert len(str(plan).splitlines()) <= 14 < len(plan.explain().splitlines())
    rows = rows_of(plan)
    assert list(rows) == ["plan", "step", "memory", "also", "advice"]
    assert rows["plan"][0] in plan.explain()
    assert "samples/s per GPU" in rows["step"][0]
    memory = r".* per device, 17.6 MiB reserved, 4.8 GiB for CUDA and NCCL, 75.2 GiB free; the"
    assert re.match(memory, rows["memory"][0])


def test_alternatives_are_the_best_of_three_families() -> None:
    plan = planned()
    own = Alternative("search on dp=4", 1.0)
    others = [
        Alternative("ZeRO-3 on dp=4 x tp=1", 1.1, recipe="ZeRO-3"),
        Alternative("Megatron on dp=2 x tp=2", 1.2, recipe="Megatron"),
        Alternative("Megatron on dp=1 x tp=4", 1.3, recipe="Megatron"),
        Alternative("several stages", None, least_s=1.4),
    ]
    data = replace(plan.data, chosen=own.name, alternatives=(own, *others))
    also = rows_of(replace(plan, data=data))["also"]
    assert [re.split("  +", text) for text in also] == [
        ["ZeRO-3 on dp=4 x tp=1", "1.1 s", "slower by 10%"],
        ["Megatron on dp=2 x tp=2", "1.2 s", "slower by 20%"],
        ["several stages", "-", "ruled out: at least 1.4 s"],
    ]


def test_what_does_not_fit_shares_a_line() -> None:
    """Recipes of which nothing fits, by what their leanest plans lack; and not the plan's own."""
    plan = planned()
    own = Alternative("Megatron on dp=1 x tp=4", 1.0, recipe="Megatron")
    large = [("Megatron", 80), ("HSDP", 73), ("HSDP", 90), ("ZeRO-1", 75), ("ZeRO-2", 99), ("", 74)]
    rows = [
        own,
        *(Alternative(f"{of} {n}", None, recipe=of, peak_bytes=n * 2.0**30) for of, n in large),
        Alternative("ZeRO-2 on dp=4", None, recipe="ZeRO-2", least_s=2.0),
    ]
    data = replace(plan.data, chosen=own.name, alternatives=tuple(rows))
    assert [" ".join(text.split()) for text in rows_of(replace(plan, data=data))["also"]] == [
        "ZeRO-2 on dp=4 - ruled out: at least 2 s",
        "does not fit: HSDP, by 1.0 GiB; ZeRO-1, by 3.0 GiB",
    ]


def test_state_in_half_precision_is_not_left_out() -> None:
    advice = rows_of(planned(dtype=torch.bfloat16))["advice"]
    assert any('precision="bf16-mixed" keeps float32' in text for text in advice)


def test_a_recipe_has_no_bound_and_no_alternatives() -> None:
    model = nn.Linear(8, 8)
    plan = autopar.plan(
        model, (1, 2), (torch.empty(4, 8),), manual=Manual(dp=2), loss_fn=lambda out, _: out.sum()
    )
    rows = rows_of(plan)
    assert "no plan takes less" not in rows["step"][0] and "also" not in rows
    assert "samples/s per device" in rows["step"][0]


def test_repr_and_notebooks_are_short() -> None:
    plan = planned()
    assert re.fullmatch(
        r"<Plan of Sequential on \(dp=\d x tp=\d\), 1 microbatch: [^\n]+>", repr(plan)
    )
    shown = plan._repr_html_()
    assert plan.verdict()[0] in shown and shown.count("<tr>") == sum(
        map(len, rows_of(plan).values())
    )
    assert "<Plan" not in Plan(replace(plan.data, model="<b>"))._repr_html_()
    assert Plan(replace(plan.data, model="<b>"))._repr_html_() == "unbound plan of &lt;b&gt;"
