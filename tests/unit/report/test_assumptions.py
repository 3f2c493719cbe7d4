"""What `explain` says a prediction takes for granted, and its advice about dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Device, Link, Manual, Mesh, Plan

WIDTH = 4096


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def model(width: int = WIDTH) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def squared(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.float().square().mean()


def planned(width: int = WIDTH, rows: int = 8192, mesh: Mesh | None = None, **options: Any) -> Plan:
    return autopar.plan(
        model(width), mesh or Mesh((1, 2), hardware="a100-80gb"),
        (torch.empty(rows, width, device="meta"),), manual=Manual(dp=2), loss_fn=squared,
        microbatches=1, **options,
    )  # fmt: skip


@lru_cache
def wide(precision: str = "model") -> Plan:
    return planned(precision=precision)


def line(plan: Plan, word: str) -> str:
    found = [text for text in plan.explain().splitlines() if text.startswith(f"{word}:")]
    return " | ".join(found)


def test_rates_and_what_mfu_counts() -> None:
    assert "a100-80gb, 18.1 TFLOP/s of matmuls in float32 (MFU counts 19.5)" in line(
        wide(), "assumed"
    )
    assert "in bfloat16 (MFU counts 312)" in line(wide("bf16-mixed"), "assumed")
    said = line(wide(), "assumed")
    assert re.search(r"; 80% of published steps lie within \d+% of predicted ones$", said)


def test_bytes_of_state() -> None:
    assert line(wide(), "state").endswith(
        "16 bytes a parameter: 4 stored, 4 of its gradient, 8 of adamw"
    )
    assert line(wide("bf16-mixed"), "state").endswith("; and 2 of its cast while a step runs")
    assert "8 bytes a parameter: 4 stored, 4 of its gradient, 0 of sgd" in line(
        planned(optimizer="sgd"), "state"
    )


def test_advice_is_near_what_planning_finds() -> None:
    """Estimated from rates alone; planned again, the gain is within a quarter of it."""
    advised = re.search(r'bf16-mixed" would be about ([\d.]+) times', line(wide(), "advice"))
    assert advised is not None
    gain = wide().predicted.step_time_s / wide("bf16-mixed").predicted.step_time_s
    assert float(advised[1]) == pytest.approx(gain, rel=0.25)
    assert not line(wide("bf16-mixed"), "advice")


def test_tf32(tf32: None) -> None:
    plan = planned()
    assert "in float32 (TF32" in line(plan, "assumed") and "counts 156" in line(plan, "assumed")
    assert "TF32" not in line(plan, "advice") and "bf16-mixed" in line(plan, "advice")


def test_tf32_is_advised_where_it_is_off() -> None:
    assert 'torch.set_float32_matmul_precision("high")' in line(wide(), "advice")


def test_launches_of_small_models() -> None:
    """The host needs longer than kernels that are small."""
    small = line(planned(64, rows=8), "host")
    assert re.search(r"\d+ launches of 8 µs in a microbatch take \d+", small), small
    assert not line(wide(), "host")


def test_a_device_of_one_rate_has_no_advice() -> None:
    mesh = Mesh((1, 2), links=[Link(1e-6, 1e-9)] * 2, device=Device(1e13, 1e12, 8e10, 1e-6))
    plan = planned(mesh=mesh)
    assert "explicit" in line(plan, "assumed") and "err" not in line(plan, "assumed")
    assert not line(plan, "advice") and not line(plan, "host")
