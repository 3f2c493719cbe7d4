"""Profiles reproduce what their sources measured: matmuls by size, collectives, attention.

Kernels measured alone are compared with a profile, without software, under which whole training
steps are slower (`cost/hardware/software.py`). The readings are those that the profiles name. If a
constant is a fit to several readings, all of them are here.
"""

from __future__ import annotations

import pytest
import torch

from autopar.cost.hardware import (
    attention_flops_per_s,
    flat_group,
    link_hardware,
    load_profile,
    resolve,
)
from autopar.cost.laws import bus_bytes_per_s, collective_time_s, op_time_s
from autopar.mesh import Link, Mesh

GIB = 1024**3
LINKS = (Link(0.0, 0.0),)

# m, n, k, dtype, TFLOPS: Azure AI-benchmarking-guide, ND A100 v4 results; torch-performance-test-
# data issues 140 (V100) and 79 (H100).
PRODUCTS = [
    ("v100-16gb", 2048, 2048, 2048, torch.float16, 78.2),
    ("v100-16gb", 4096, 4096, 4096, torch.float16, 95.7),
    ("v100-16gb", 8192, 8192, 8192, torch.float16, 97.4),
    ("v100-16gb", 10240, 10240, 10240, torch.float16, 89.4),
    ("v100-16gb", 8192, 8192, 8192, torch.float32, 14.4),
    ("v100-16gb", 8192, 8192, 8192, torch.bfloat16, 10.65),
    ("a100-80gb", 2048, 2048, 2048, torch.float16, 221.8),
    ("a100-80gb", 4096, 4096, 4096, torch.float16, 228.0),
    ("a100-80gb", 8192, 8192, 8192, torch.float16, 253.7),
    ("a100-80gb", 16384, 16384, 16384, torch.float16, 256.5),
    ("a100-80gb", 6144, 12288, 12288, torch.float16, 250.8),
    ("h100-sxm", 2048, 2048, 2048, torch.bfloat16, 676.6),
    ("h100-sxm", 4096, 4096, 4096, torch.bfloat16, 788.7),
    ("h100-sxm", 8192, 8192, 8192, torch.bfloat16, 797.5),
    ("h100-sxm", 10240, 10240, 10240, torch.bfloat16, 719.7),
    ("h100-sxm", 8192, 8192, 8192, torch.float32, 51.8),
]


@pytest.mark.parametrize(("name", "m", "n", "k", "dtype", "published_tflops"), PRODUCTS)
def test_products(
    name: str, m: int, n: int, k: int, dtype: torch.dtype, published_tflops: float
) -> None:
    device = link_hardware(load_profile(name), LINKS, dtype).device
    flops, moved_bytes = 2.0 * m * n * k, float((m * k + k * n + m * n) * dtype.itemsize)
    predicted = flops / op_time_s(flops, moved_bytes, device, dtype) / 1e12
    assert predicted == pytest.approx(published_tflops, rel=0.18)


# Bus bandwidth in GB/s of an all_reduce of 8 GiB: Azure AI-benchmarking-guide (8 H200;
# 4 GB200, whose NVLink is B200's, by a ring), nccl issue 1807 (8 B200), coreweave/nccl-tests pull
# request 43 (72 GB200), nccl issue 1639 (8 RTX 5090), nccl-tests issue 178 (3 A100 over PCIe).
BUS_GB_PER_S = [
    ("h200", 8, True, 480.0), ("b200", 8, True, 830.0), ("b200", 4, False, 679.6),
    ("gb200", 4, False, 679.6), ("gb200", 72, True, 846.8), ("rtx-5090", 8, False, 28.0),
    ("a100-pcie-80gb", 3, False, 20.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "n_ranks", "in_switch", "published"), BUS_GB_PER_S)
def test_all_reduce_inside_a_node(
    name: str, n_ranks: int, in_switch: bool, published: float
) -> None:
    link = load_profile(name).link("intra_node")
    if not in_switch:
        link = type(link)(link.latency_s, link.s_per_byte)
    time_s = collective_time_s("all_reduce", 8 * GIB, flat_group(n_ranks, link))
    bus = bus_bytes_per_s("all_reduce", 8 * GIB, n_ranks, time_s)
    assert bus / 1e9 == pytest.approx(published, rel=0.02)


# Bus bandwidth in GB/s of all_reduces of 1, 2, 4, ... 512 KiB, 1 to 512 MiB, and 1 to 8 GiB:
# Azure AI-benchmarking-guide. The latencies of the profiles are fitted to them.
BUS_BY_SIZE = {
    "a100-80gb": (
        (0.04, 0.08, 0.17, 0.33, 0.67, 1.37, 2.70, 5.15, 10.11, 19.24),
        (36.22, 53.54, 71.43, 89.99, 109.22, 132.77, 166.63, 174.18, 213.87, 221.58),
        (228.10, 230.22, 230.48, 231.58),
    ),
    "h100-sxm": (
        (0.07, 0.14, 0.27, 0.53, 0.95, 1.71, 2.72, 5.40, 10.86, 21.35),
        (43.70, 81.93, 128.73, 172.13, 234.45, 295.53, 361.78, 400.61, 423.38, 438.46),
        (466.35, 472.36, 475.54, 478.87),
    ),
    "h200": (
        (0.06, 0.12, 0.23, 0.47, 0.93, 1.84, 3.72, 7.39, 14.75, 29.38),
        (52.96, 88.78, 138.44, 181.94, 240.41, 300.91, 368.11, 412.45, 432.24, 442.72),
        (467.58, 472.57, 477.41, 479.98),
    ),
}


@pytest.mark.parametrize("name", BUS_BY_SIZE)
def test_all_reduce_by_size(name: str) -> None:
    group = flat_group(8, load_profile(name).link("intra_node"))
    errors = []
    for unit, readings in zip((1024, 1024**2, GIB), BUS_BY_SIZE[name], strict=True):
        for power, published in enumerate(readings):
            size = float(unit * 2**power)
            bus = bus_bytes_per_s(
                "all_reduce", size, 8, collective_time_s("all_reduce", size, group)
            )
            errors.append(abs(published * 1e9 / bus - 1))  # relative error of the time
    assert sum(errors) / len(errors) < 0.09
    assert max(errors) < 0.4


# Triad of BabelStream, TB/s: Azure AI-benchmarking-guide.
@pytest.mark.parametrize(
    ("name", "published"), [("a100-80gb", 1.70), ("h100-sxm", 2.97), ("h200", 4.15)]
)
def test_memory_bandwidth(name: str, published: float) -> None:
    device = resolve(Mesh((1, 8), hardware=name)).device
    assert device.bytes_per_s / 1e12 == pytest.approx(published, rel=0.01)


# FlashAttention-2's forward, sequence 8192, TFLOPS: Azure AI-benchmarking-guide.
@pytest.mark.parametrize(("name", "published"), [("a100-80gb", 179.5), ("h100-sxm", 327.9)])
def test_fused_attention(name: str, published: float) -> None:
    device = link_hardware(load_profile(name), LINKS, torch.bfloat16).device
    forward, backward = attention_flops_per_s(device, torch.bfloat16)
    assert forward / 1e12 == pytest.approx(published, rel=0.02)
    assert backward < forward
