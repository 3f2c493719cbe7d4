"""Calibration recovers planted constants, and plans can be made with a measured profile."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.calibration import Calibration, calibrate
from autopar.calibration.fit import fit_link, fit_memory, fit_products, fit_steps, median_error
from autopar.calibration.machine import LocalMachine
from autopar.calibration.samples import CPU, OperatorSample, Samples, StepSample, TransferSample
from autopar.cost.hardware import flat_group, load_profile, resolve
from autopar.cost.laws import collective_time_s
from autopar.errors import CalibrationError
from autopar.mesh import Link, Mesh
from tests.helpers.nightly import nightly

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
CPU_MACHINE = LocalMachine("a CPU", False, 2, 16 << 30, 300 << 20)


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def memory_samples(bytes_per_s: float, launch_s: float) -> list[OperatorSample]:
    return [
        OperatorSample("add", "", "", 0.0, size, n, size / bytes_per_s + n * launch_s)
        for size in (1e3, 1e5, 1e6, 1e7, 1e8)
        for n in (1, 8)
    ]


def product_samples(
    rates: dict[str, float], ratio: float, bytes_per_s: float, launch_s: float
) -> list[OperatorSample]:
    samples = []
    for dtype, rate in rates.items():
        for m, n, k in CPU.product_shapes:
            flops, width = 6.0 * m * n * k, getattr(torch, dtype).itemsize
            touched = 3.0 * width * (m * n + n * k + k * m)
            memory_s = touched / bytes_per_s
            time_s = max(flops / rate + ratio * memory_s, memory_s) + 3 * launch_s
            samples.append(OperatorSample(f"{dtype} product", "", dtype, flops, touched, 3, time_s))
    return samples


def transfer_samples(link: Link, noise: np.random.Generator | None = None) -> list[TransferSample]:
    samples = []
    for n_ranks, turns in ((2, 1.0), (2, 2.0), (4, 2.0), (3, 1.5)):
        for kind in COLLECTIVES:
            for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
                time_s = turns * collective_time_s(kind, size, flat_group(n_ranks, link))
                if noise is not None:
                    time_s *= math.exp(noise.normal(0.0, 0.1))
                samples.append(TransferSample(kind, size, n_ranks, turns, time_s))
    return samples


@settings(max_examples=25, deadline=None)
@given(magnitudes(1e9, 1e13), magnitudes(1e-6, 1e-4))
def test_memory_constants_are_found(bytes_per_s: float, launch_s: float) -> None:
    found = fit_memory(memory_samples(bytes_per_s, launch_s))
    assert found.launch_s == pytest.approx(launch_s, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert median_error(found.residuals) < 1e-3


@settings(max_examples=25, deadline=None)
@given(magnitudes(1e10, 1e12), magnitudes(1e9, 1e12), st.floats(0.05, 4.0))
def test_product_constants_are_found(float32: float, bfloat16: float, ratio: float) -> None:
    rates, bytes_per_s, launch_s = {"float32": float32, "bfloat16": bfloat16}, 1e10, 1e-6
    memory = fit_memory(memory_samples(bytes_per_s, launch_s))
    samples = product_samples(rates, ratio, bytes_per_s, launch_s)
    found = fit_products(samples, memory)
    for residual in found.residuals:
        assert abs(residual.error) < 0.01
    # Matmuls that are bound by memory alone do not determine their rate.
    bound = [s.size_bytes / bytes_per_s + 3 * launch_s for s in samples]
    for dtype, rate in rates.items():
        shown = [
            s.time_s > 1.01 * b for s, b in zip(samples, bound, strict=True) if s.dtype == dtype
        ]
        if sum(shown) > len(shown) // 2:
            assert found.rates_flops_per_s[dtype] == pytest.approx(rate, rel=0.05)
    assert all(found.best_flops_per_s[d] <= rates[d] for d in rates)


@settings(max_examples=25, deadline=None)
@given(magnitudes(1e-6, 1e-2), magnitudes(1e-12, 1e-8))
def test_link_constants_are_found(latency_s: float, s_per_byte: float) -> None:
    ratios = ("reduce_scatter", 2.0), ("send_recv", 0.3)
    found = fit_link(transfer_samples(Link(latency_s, s_per_byte, ratios=ratios)))
    assert median_error(found.residuals) < 1e-3
    for kind, ratio in ratios:
        assert found.link.ratio(kind) == pytest.approx(ratio, rel=1e-2)
    # A latency or a bandwidth that never matters is not determined.
    if 1e2 < latency_s / s_per_byte < 1e7:
        assert found.link.latency_s == pytest.approx(latency_s, rel=1e-2)
        assert found.link.s_per_byte == pytest.approx(s_per_byte, rel=1e-2)


def step_samples(
    ratios: tuple[float, float, float], noise: np.random.Generator | None = None
) -> list[StepSample]:
    """Some steps mostly wait for launches or for collectives, others hardly do."""
    samples = []
    for parts_s in (
        (1e-3, 4e-3, 0.0), (0.05, 3e-3, 0.0), (0.2, 2e-3, 0.0),
        (0.1, 3e-3, 0.01), (0.05, 4e-3, 0.1),
    ):  # fmt: skip
        time_s = sum(ratio * part_s for ratio, part_s in zip(ratios, parts_s, strict=True))
        if noise is not None:
            time_s *= math.exp(noise.normal(0.0, 0.05))
        samples.append(StepSample("encoder", "", *parts_s, time_s))
    return samples


@settings(max_examples=25, deadline=None)
@given(magnitudes(0.5, 3.0), magnitudes(0.5, 5.0), magnitudes(0.5, 3.0))
def test_ratios_of_steps_are_found(work: float, launch: float, transfer: float) -> None:
    found = fit_steps(step_samples((work, launch, transfer)))
    assert found.work_ratio == pytest.approx(work, rel=5e-3)
    assert found.launch_ratio == pytest.approx(launch, rel=5e-3)
    assert found.transfer_ratio == pytest.approx(transfer, rel=5e-3)
    assert median_error(found.residuals) < 5e-3
    noisy = fit_steps(step_samples((work, launch, transfer), np.random.default_rng(0)))
    assert noisy.work_ratio == pytest.approx(work, rel=0.1)


def test_a_ratio_that_no_step_tells_stays_one() -> None:
    work_alone = [replace(s, launch_s=0.0, transfer_s=0.0) for s in step_samples((1.3, 0.0, 0.0))]
    found = fit_steps(work_alone)
    assert found.work_ratio == pytest.approx(1.3, rel=1e-3)
    assert (found.launch_ratio, found.transfer_ratio) == pytest.approx((1.0, 1.0), rel=1e-6)


def test_noise_does_not_pull_constants_to_one_side() -> None:
    link = Link(1e-4, 1e-9)
    found = fit_link(transfer_samples(link, np.random.default_rng(0))).link
    assert found.ratio("reduce_scatter") == pytest.approx(1.0, rel=0.05)
    assert found.latency_s == pytest.approx(link.latency_s, rel=0.05)
    assert found.s_per_byte == pytest.approx(link.s_per_byte, rel=0.05)


def test_times_that_do_not_grow_with_the_work_are_refused() -> None:
    small_is_slow = [
        OperatorSample("add", "", "", 0.0, 1e9 / 10**i, 1, 1e-3 * (i + 1)) for i in range(6)
    ]
    with pytest.raises(CalibrationError, match="no bandwidth of memory fits") as refused:
        fit_memory(small_is_slow)
    assert "idle" in str(refused.value)
    falling = [TransferSample("send_recv", 1 << (10 + i), 2, 1.0, 1e-3 / (i + 1)) for i in range(8)]
    with pytest.raises(CalibrationError, match="no bandwidth of a link fits"):
        fit_link(falling)


def planted(steps: list[StepSample] | None = None) -> Calibration:
    samples = Samples(
        n_busy=2,
        operators=memory_samples(1e10, 1e-5)
        + product_samples({"float32": 6e10, "float64": 3e10}, 0.5, 1e10, 1e-5),
        transfers=transfer_samples(Link(1e-4, 1e-9)),
        turns=[(4, 2.1)],
        steps=steps or [],
    )
    return Calibration.of(samples, CPU_MACHINE)


def test_ranks_that_share_cores_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    planted().save(path)
    alone, shared = (resolve(Mesh((1, n), hardware=str(path))) for n in (2, 4))
    assert load_profile(path).name == "machine"
    assert shared.device.flops_per_s == pytest.approx(alone.device.flops_per_s / 2)
    assert shared.device.bytes_per_s == pytest.approx(alone.device.bytes_per_s / 2)
    assert shared.device.launch_s == pytest.approx(2 * alone.device.launch_s)
    assert shared.links[-1].latency_s == pytest.approx(2 * alone.links[-1].latency_s)
    assert shared.links[-1].s_per_byte == pytest.approx(2 * alone.links[-1].s_per_byte)
    assert shared.memory_limit_bytes == alone.memory_limit_bytes
    assert resolve(Mesh((1, 1), hardware=str(path))).device == alone.device


@pytest.mark.parametrize("work_ratio", [1.25, 0.8])
def test_what_is_achieved_is_achieved_in_steps(work_ratio: float) -> None:
    alone, found = planted(), planted(step_samples((work_ratio, 2.0, 1.5)))
    for peak, achieved in (
        ("device.peak_bytes_per_s", "device.achieved_bandwidth_fraction"),
        ("device.peak_flops_per_s.float32", "device.achieved_flops_fraction.float32"),
        ("device.peak_flops_per_s.float64", "device.achieved_flops_fraction.float64"),
    ):
        before, after = (
            c.quantities[peak].value * c.quantities[achieved].value for c in (alone, found)
        )
        share = found.quantities[achieved]
        assert after == pytest.approx(before / work_ratio, rel=5e-3)
        assert share.value <= 1.0
        assert f"over {work_ratio:.2f}, by least squares over 5 whole steps" in share.source
    launch = found.quantities["device.launch_s"]
    assert launch.value == pytest.approx(2 * alone.quantities["device.launch_s"].value, rel=5e-3)
    assert "times 2.00" in launch.source
    for key in ("link.intra_node.latency_s", "link.inter_node.s_per_byte"):
        ratio = found.quantities[key].value / alone.quantities[key].value
        assert ratio == pytest.approx(1.5, rel=5e-3)
    assert "times 1.50" in found.quantities["link.intra_node.latency_s"].source
    assert "whole training steps: median error of the fit 0%" in found.text()
    said = f"products and memory {work_ratio:.2f}, launches 2.00, collectives 1.50"
    assert said in found.text()
    assert found.to_json()["in_steps_times_as_long"]["launches"] == pytest.approx(2, rel=5e-3)
    assert len(found.to_json()["fits"]["whole training steps"]["residuals"]) == 5


def test_every_number_of_a_profile_says_where_it_was_measured() -> None:
    found = planted()
    assert found.quantities["device.launch_s"].value == pytest.approx(1e-5, rel=1e-2)
    assert found.quantities["node.cores_count"].value == 2
    assert "4 ranks took 2.10 times as long as 2" in found.quantities["node.cores_count"].source
    for key, quantity in found.quantities.items():
        assert "a CPU, torch" in quantity.source or "intra_node's" in quantity.source, key
    text = found.text()
    assert "all_reduce over 4" in text
    assert "median error of the fit 0%" in text


@nightly
def test_this_machine(tmp_path: Path) -> None:
    """Measure a profile, save it, load it, resolve it, and plan with it."""
    phases: list[str] = []
    found = calibrate([2], quick=True, progress=phases.append)
    path = tmp_path / "here.toml"
    found.save(path)
    assert len(phases) >= 2
    # All memory traffic of matmuls may be hidden; nothing else may be zero.
    zeros = {key for key, quantity in found.quantities.items() if quantity.value <= 0}
    assert zeros <= {"device.product_traffic_ratio"}
    assert {s.kind for s in found.samples.transfers} == set(COLLECTIVES)
    assert found.samples.steps
    assert all(min(s.work_s, s.launch_s, s.time_s) > 0 for s in found.samples.steps)
    assert any(s.transfer_s > 0 for s in found.samples.steps)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert resolve(Mesh((1, 2), hardware=str(path)), dtype).device.flops_per_s > 0
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    plan = autopar.plan(
        model, Mesh((1, 2), hardware=str(path)), (torch.zeros(8, 16),),
        loss_fn=lambda out, batch: out.square().mean(),
    )  # fmt: skip
    assert plan.predicted.step_time_s > 0
