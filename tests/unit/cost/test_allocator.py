"""Memory as allocators see it: peaks of published runs, workspaces, reserved bytes, the hint."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.hardware import Hardware, resolve
from autopar.cost.memory import footprint, footprint_of_plan, least_margin, workspace_bytes
from autopar.cost.published import GOLDEN_MEMORY, read_runs
from autopar.cost.published.rows import read_row
from autopar.errors import InfeasibleError, NotSupportedError
from autopar.mesh import Mesh

MIB = 2**20


def error_of(run: dict[str, Any]) -> float:
    """The error of a run's peak, allocated or reserved, on the rank that it states."""
    row = read_row(run)
    assert row.memory_bytes is not None
    takes = row.step().footprint(row.memory_rank, row.setting)
    found = {"allocated": takes.allocated_bytes, "reserved": takes.reserved_bytes}
    return found[row.memory_kind] / row.memory_bytes - 1


# kind of model -> number of rows, and the limits of the mean and the worst error
@pytest.mark.parametrize(("kind", "n", "mean", "worst"), [
    ("gpt", 24, 0.015, 0.045), ("moe", 23, 0.025, 0.07), ("bert", 2, 0.055, 0.07),
    ("mla", 2, 0.01, 0.01), ("mla-moe", 1, 0.025, 0.025),
])  # fmt: skip
def test_peaks_of_regression_runs(kind: str, n: int, mean: float, worst: float) -> None:
    errors = []
    for run in read_runs(GOLDEN_MEMORY).runs:
        if run["model"]["kind"] == kind and not why_skipped(run):
            errors.append(abs(error_of(dict(run))))
    assert len(errors) == n
    assert sum(errors) / n < mean
    assert max(errors) < worst


def why_skipped(run: Any) -> str:
    try:
        read_row(run)
    except NotSupportedError as error:
        return str(error)
    return ""


def test_a_row_overrides_what_is_derived(pipelined: dict[str, Any]) -> None:
    """Of features that move memory, too; deferred gradients of the head are all, or so many."""
    changed = pipelined | {"software": {"loss": "engine", "transformer_engine": True}}
    software, derived = read_row(changed).software, read_row(pipelined).software
    assert (software.loss, software.transformer_engine) == ("engine", True)
    assert (derived.loss, derived.transformer_engine) == ("in-place", False)
    defers = {"defer_embedding_wgrad_compute": True}
    every = read_row(pipelined | {"extra": defers})
    few = read_row(pipelined | {"extra": defers | {"wgrad_deferral_limit": 2}})
    assert every.recipe.deferred >= every.recipe.n_microbatches > few.recipe.deferred == 2
    peaks = [row.step().peak_bytes("last") for row in (read_row(pipelined), few, every)]
    assert peaks == sorted(set(peaks))


def test_rows_with_what_is_not_modelled_say_so() -> None:
    reasons = [why for run in read_runs(GOLDEN_MEMORY).runs if (why := why_skipped(run))]
    assert sorted(reasons) == [
        *["an encoder beside a decoder"] * 4,
        "dtype 'fp8 tensorwise/bf16'", "dtype 'fp8 tensorwise/fp32'",
        "layers that predict further tokens",
    ]  # fmt: skip


def test_a_toy_run_is_scored_by_its_bytes_alone() -> None:
    rows = [(read_row(r), r["extra"]) for r in read_runs(GOLDEN_MEMORY).runs if not why_skipped(r)]
    assert all(row.step_time_s is None for row, extra in rows if extra.get("toy"))
    assert any(row.step_time_s for row, _ in rows)


def test_the_peaks_of_shipped_runs() -> None:
    """seqsel_f1 rows are a paper's formulas, and no allocator's readings."""
    errors = [
        abs(error_of(dict(run)))
        for run in read_runs().runs
        if run["metric"].get("mem_gib") and not run["id"].startswith("seqsel_f1_")
    ]
    assert len(errors) == 19
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.05


@pytest.fixture
def pipelined() -> dict[str, Any]:
    """A pipeline of four stages, of which the first keeps most."""
    runs = read_runs().runs
    return dict(next(run for run in runs if run["id"] == "zb_1.5B_1f1b_m24"))


def test_the_peak_is_of_the_rank_that_a_row_names(pipelined: dict[str, Any]) -> None:
    def peak(**words: Any) -> float:
        row = read_row(pipelined | words)
        return row.step().peak_bytes(row.memory_rank)

    every = [peak(memory_rank=rank) for rank in range(8)]
    assert peak() == peak(memory_rank="fullest") == max(every)
    assert peak(memory_rank="first") == every[0] and peak(memory_rank="last") == every[-1]
    assert peak(extra={"memory_rank": "last"}) == every[-1] != every[0]
    with pytest.raises(NotSupportedError, match="memory of rank 'middle'"):
        peak(memory_rank="middle")


def test_workspaces() -> None:
    assert workspace_bytes("a100-80gb") == 2 * (8 * MIB + 128 * 1024)
    assert workspace_bytes("a100-80gb", is_wide=True, has_engine=True) == (64 + 4) * MIB
    assert workspace_bytes("h100-sxm") == workspace_bytes("gb200") == 64 * MIB
    assert workspace_bytes("mi300x") == 256 * MIB
    grouped = workspace_bytes("h100-sxm", has_engine=True, is_grouped=True)
    assert grouped == (64 + 5 * 32) * MIB


def hardware_of(name: str) -> Hardware:
    return resolve(Mesh((1, 8), hardware=name), torch.bfloat16)


@pytest.mark.parametrize("name", ["a100-80gb", "h100-sxm", "b200", "rtx-4090"])
def test_what_fits_under_a_setting(name: str) -> None:
    """At the limit of either setting, reserved bytes and the margin are the whole device."""
    hardware = hardware_of(name)
    whole_bytes = hardware.device.memory_bytes
    assert 0 < least_margin("expandable", hardware) < hardware.memory_margin_fraction
    assert least_margin("default", hardware) == pytest.approx(
        hardware.memory_margin_fraction, abs=0.003
    )
    for setting in ("default", "expandable"):
        margin = least_margin(setting, hardware)
        found = footprint(hardware.limit_bytes(None, margin), hardware, setting)
        taken_bytes = found.reserved_bytes + found.margin_bytes
        assert 0.995 < taken_bytes / whole_bytes <= 1
    assert footprint_of_plan(0.0, hardware).allocated_bytes == workspace_bytes(name)


def test_a_device_without_the_allocator_reserves_what_is_allocated() -> None:
    hardware = hardware_of("cpu-local")
    assert footprint_of_plan(1e9, hardware).reserved_bytes == 1e9
    assert least_margin("expandable", hardware) == hardware.memory_margin_fraction


def refusal(share: float, **options: Any) -> InfeasibleError:
    """The refusal of a model that needs this share of a device for 20 bytes per weight."""
    mesh = Mesh((1,), hardware="a100-80gb")
    n_weights = share * resolve(mesh).device.memory_bytes / 20
    with torch.device("meta"):
        model = nn.Linear(1024, int(n_weights / 1024), bias=False)
        batch = {"input": torch.empty(1, 1024)}
    with pytest.raises(InfeasibleError) as found:
        autopar.plan(model, mesh, batch, loss_fn=lambda out, _: out.sum(), **options)
    return found.value


def test_the_first_hint_is_the_setting_where_that_is_enough() -> None:
    error = refusal(0.91)
    assert error.hint is not None
    words, margin = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and memory_margin=", 0.08
    assert error.hint.index(words) < error.hint.index("use more microbatches or devices")
    margin = float(error.hint.split(words)[1].split(";")[0])
    assert error.least_bytes is not None
    limit_bytes = hardware_of("a100-80gb").limit_bytes(None, margin)
    assert error.least_bytes <= limit_bytes
    for other in (refusal(0.97), refusal(0.91, memory_margin=0.1)):
        assert "expandable" not in str(other)
    assert math.isclose(error.least_bytes, refusal(0.91, memory_margin=0.1).least_bytes or 0)
