"""Hardware profiles: every number has a source, bad files are refused, any mesh resolves."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cost.hardware import (
    PROFILE_FOLDER,
    Hardware,
    Profile,
    attention_flops_per_s,
    available_profiles,
    detect,
    load_profile,
    load_software,
    resolve,
    shipped_name,
    software_of,
)
from autopar.cost.hardware.names import spelling_of
from autopar.cost.hardware.profile import DEFAULTS
from autopar.errors import NotSupportedError, OptionError
from autopar.mesh import Device, Link, Mesh

CPU_TEXT = (PROFILE_FOLDER / "cpu-local.toml").read_text()
UNITS = "_s|_per_s|_per_byte|_bytes|_fraction|_ratio|_count"
SHIPPED = tuple(
    """a100-40gb a100-80gb a100-pcie-40gb a100-pcie-80gb a10g b200 cpu-local gb200 h100-96gb
    h100-nvl h100-pcie h100-sxm h200 l4 l40s mi300x rtx-3090 rtx-4090 rtx-5090 rtx-a6000 v100-16gb
    v100-32gb""".split()
)
DEVICE = Device(flops_per_s=1e12, bytes_per_s=1e11, memory_bytes=1e10)


def numbers(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number of a profile with the table that holds it."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, str | list):
            yield prefix + key, table


@pytest.mark.parametrize("name", available_profiles())
def test_every_number_has_a_source_and_a_unit(name: str) -> None:
    content = tomllib.loads((PROFILE_FOLDER / f"{name}.toml").read_text())
    assert content["name"] == name
    found = list(numbers(content))
    assert len(found) >= 15
    for key, table in found:
        assert key.endswith(".value"), key
        assert len(table["source"]) > 20, key
        assert re.search(rf"({UNITS})(\.\w*float\d*|\.forward|\.backward)?\.value$", key)
    profile = load_profile(name)
    assert len(profile.quantities) == len(found)


def test_the_shipped_profiles_are_the_documented_ones() -> None:
    assert available_profiles() == SHIPPED


def test_unknown_profile_and_missing_file_are_wrong_options(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown hardware profile 'tpu'") as caught:
        resolve(Mesh((1, 4), hardware="tpu"))
    assert "v100-16gb, v100-32gb, or the path" in str(caught.value)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(OptionError, match="no hardware profile file"):
        load_profile(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("MI300X", "mi300x"),
        ("A100_80GB", "a100-80gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("nvidia h100 pcie", "h100-pcie"),
        ("L4", "l4"),
    ],
)
def test_spellings_of_a_name_are_one_profile(given: str, name: str) -> None:
    mesh = Mesh((1, 2), hardware=given)
    assert resolve(mesh) == resolve(Mesh((1, 2), hardware=name))
    assert resolve(mesh).profile_name == name


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("4090", ["rtx-4090"]),
        ("3090ti", ["rtx-3090"]),
        ("H100-SXM5", ["h100-sxm", "h100-96gb", "h100-pcie", "h100-nvl"]),
        ("h100", ["h100-sxm", "h100-nvl", "h100-pcie", "h100-96gb"]),
        ("a100", ["a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"]),
        ("l40", ["l40s", "l4"]),
        ("h20", ["h200"]),
        ("a6000", ["rtx-a6000"]),
        ("cpu", ["cpu-local"]),
        ("v100-23gb", ["v100-32gb", "v100-16gb"]),
    ],
)
def test_names_that_are_near_are_suggested_and_not_taken(given: str, near: list[str]) -> None:
    with pytest.raises(OptionError, match=f"unknown hardware profile '{given}'") as caught:
        load_profile(given)
    meant = re.search(r"did you mean (.*?)\?", str(caught.value))
    assert meant is not None
    assert sorted(re.findall(r"'(.*?)'", meant[1])) == sorted(near)
    assert "autopar calibrate" in str(caught.value)


def test_no_two_profiles_are_spelled_alike() -> None:
    spellings = [
        (spelling_of(known), name)
        for name in SHIPPED
        for known in {name, *load_profile(name).cuda_names}
    ]
    owners = dict(spellings)
    assert all(owners[spelling] == name for spelling, name in spellings)
    assert all(shipped_name(spelling) == name for spelling, name in spellings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r'source = "a choice: 4 GiB[^\n]*', "", r"\[device\.memory_bytes\] needs exactly value"),
        (r'source = "a choice: 4 GiB[^\n]*', 'source = " "', "memory_bytes] has an empty source"),
        (r"(\[device\.launch_s\]\n)value = \S+", r"\1", r"\[device\.launch_s\] needs exactly"),
        (r"value = 4.0e-6", "value = -4.0e-6", "is not a number of at least 0"),
        (r"value = 4.0e-6", 'value = "4 us"', "device.launch_s] value is not a number"),
        (r"value = 4.0e-6", "value = nan", "value = nan is not a number"),
        (r"value = 0\.1", "value = 1.5", "a fraction above 1"),
        (r"value = 0\.1", "value = 1", "leaves nothing of 4.0 GiB"),
        (
            r"value = 6.6e10",
            "value = 0",
            r"peak_flops_per_s\.float32\] value = 0 must be at least 1",
        ),
        (r"\[device\.launch_s\]", "[device.launch]", "device.launch names no unit"),
        (r"\[device\.launch_s\]", "[device.start_s]", r"missing device\.launch_s"),
        (r"\A", "size_bytes = 3\n", "size_bytes has no source"),
        (r"\Z", '\n[device.tea_s]\nvalue = 1\nsource = "x"\n', r"unknown device\.tea_s"),
        (r"achieved_flops_fraction\.float16", "achieved_flops_fraction.float8", "no unit"),
        (r"(?s)\[device\.achieved_flops_fraction\.float16\].*?\n\n", "", "missing device.achieved"),
        (r"\A", "= 3\n", "is not TOML"),
        (r'name = "cpu-local"', "name = 3", "name must be a string"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text, count = re.subn(old, new, CPU_TEXT, count=1)
    assert count == 1
    path = tmp_path / "my.toml"
    path.write_text(text)
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises(OptionError, match=pattern) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)


def reached_profile(name: str) -> Profile:
    """What autopar's runtime reaches of a shipped profile."""
    profile = load_profile(name)
    return software_of("autopar", is_gpu=bool(profile.cuda_names)).apply_to(profile)


def test_software_changes_what_a_device_reaches() -> None:
    """By its constants: rates of matmuls and attention, bytes between nodes and in memory; nothing
    else. On CPUs, whose profiles are measured where they run, it changes nothing."""
    plain, software = load_profile("a100-80gb"), load_software("torch-eager")
    rate, network, memory = (
        software.constant(f"{what}_ratio")
        for what in ("sustained_rate", "network_time", "memory_time")
    )
    reached = software.apply_to(plain)
    scaled = {
        key: reached.value(key) / plain.value(key)
        for key in plain.quantities
        if reached.value(key) != plain.value(key)
    }
    assert scaled.pop("link.inter_node.s_per_byte") == pytest.approx(network)
    assert scaled.pop("device.achieved_bandwidth_fraction") == pytest.approx(1 / memory)
    assert list(scaled.values()) == [pytest.approx(rate)] * len(scaled)
    assert all("achieved_flops" in key or "attention" in key for key in scaled)
    cpu = load_profile("cpu-local")
    assert software_of("autopar", is_gpu=False).apply_to(cpu) == cpu


def test_plans_may_assume_other_software() -> None:
    mesh = Mesh((2, 8), hardware="h100-sxm")
    ours, tuned = (
        resolve(mesh, torch.bfloat16, name) for name in ("autopar", "transformer-engine")
    )
    assert tuned.device.flops_per_s > ours.device.flops_per_s
    assert tuned.peak_flops_per_s == ours.peak_flops_per_s
    forward, _ = attention_flops_per_s(tuned.device, torch.bfloat16)
    assert forward > attention_flops_per_s(ours.device, torch.bfloat16)[0]
    with pytest.raises(OptionError, match="unknown software 'abacus'"):
        resolve(mesh, software="abacus")


@pytest.mark.parametrize("name", available_profiles())
@pytest.mark.parametrize("shape", [(4,), (1, 8), (2, 1), (64, 8)])
def test_every_mesh_shape_gets_a_link_per_axis(name: str, shape: tuple[int, ...]) -> None:
    profile = reached_profile(name)
    mesh = Mesh(shape, hardware=name)
    hardware = resolve(mesh)
    assert len(hardware.links) == len(shape)
    assert hardware.links[-1] == profile.link("intra_node")
    across = "inter_node" if mesh.nodes > 1 else "intra_node"
    assert hardware.links[0] == profile.link(across)
    used = 1 - profile.value("device.memory_margin_fraction")
    assert hardware.memory_limit_bytes == pytest.approx(used * hardware.device.memory_bytes)
    assert hardware.profile_name == name


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("shape", [(1, 8), (4, 8)])
def test_every_dtype_of_a_profile_has_its_rates(name: str, shape: tuple[int, int]) -> None:
    profile = reached_profile(name)
    achieved, peaks = profile.rates_flops_per_s(), profile.rates_flops_per_s(peak=True)
    assert {"float64", "float32", "float16", "bfloat16"} <= set(achieved)
    for dtype_name in set(achieved) - {"tfloat32"}:
        dtype = getattr(torch, dtype_name)
        hardware = resolve(Mesh(shape, hardware=name), dtype)
        assert hardware.device.flops_per_s == achieved[dtype_name]
        assert hardware.peak_flops_per_s == peaks[dtype_name] >= achieved[dtype_name]
        for rate in attention_flops_per_s(hardware.device, dtype):
            assert 0 < rate <= hardware.peak_flops_per_s


@pytest.mark.parametrize("key", DEFAULTS)
def test_what_may_be_left_out_needs_a_source_where_it_is_given(tmp_path: Path, key: str) -> None:
    path = tmp_path / "my.toml"
    text = re.sub(rf"(?s)\[{re.escape(key)}\].*?\n\n", "", CPU_TEXT)
    path.write_text(f"{text}\n[{key}]\nvalue = 1\n")
    with pytest.raises(OptionError, match=re.escape(f"[{key}] needs exactly value and source")):
        load_profile(path)
    path.write_text(f'{text}\n[{key}]\nvalue = 1\nsource = "a test"\n')
    assert load_profile(path).optional(key) == 1


def test_explicit_links_and_device_win() -> None:
    links = (Link(1e-5, 1e-9), Link(1e-6, 1e-10))
    hardware = resolve(Mesh((2, 4), links=links, device=DEVICE), torch.bfloat16)
    assert hardware == Hardware(links, DEVICE, "explicit", 1e12, 0.0, dtype=torch.bfloat16)
    assert hardware.memory_limit_bytes == 1e10


def test_tf32_is_used_where_the_process_allows_it() -> None:
    mesh = Mesh((1, 8), hardware="a100-80gb")
    exact = resolve(mesh).peak_flops_per_s
    torch.set_float32_matmul_precision("high")
    try:
        assert (exact, resolve(mesh).peak_flops_per_s) == (19.5e12, 156e12)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_dtype_without_rate_is_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"no matmul rate for torch\.int8"):
        resolve(Mesh((1, 4), hardware="cpu-local"), torch.int8)


DETECTED = {
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100": "h100-96gb",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10G": "a10g",
    "AMD Instinct MI300X": "mi300x",
}
OTHERS = (
    *("NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 5090 Laptop GPU"),
    *("NVIDIA L40", "NVIDIA A10", "NVIDIA H20", "Z9000"),
)


def test_a_device_is_detected_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without a profile is planned for as a CPU, with a warning."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cuda_name, profile_name in DETECTED.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=cuda_name: name)
        assert detect() == resolve(Mesh((1, 4))).profile_name == profile_name
    for cuda_name in OTHERS:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=cuda_name: name)
        with pytest.warns(UserWarning, match=f"no hardware profile matches '{cuda_name}'"):
            assert detect() == "cpu-local"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() == resolve(Mesh((1, 4))).profile_name == "cpu-local"
    names = [known for name in SHIPPED for known in load_profile(name).cuda_names]
    assert len(names) == len(set(names))


# Pairs (slower, faster) of bfloat16 products, memory, a port inside a node: chips of one vendor's
# line, the newer or larger last.
FASTER_PRODUCTS = [
    ("v100-32gb", "a100-40gb"), ("a100-80gb", "h100-sxm"), ("h200", "b200"), ("b200", "gb200"),
    ("a100-pcie-80gb", "h100-pcie"), ("h100-pcie", "h100-nvl"), ("h100-nvl", "h100-sxm"),
    ("rtx-3090", "rtx-4090"), ("rtx-4090", "rtx-5090"), ("rtx-3090", "rtx-a6000"), ("a10g", "l40s"),
    ("l4", "l40s"), ("rtx-5090", "b200"), ("cpu-local", "l4"),
]  # fmt: skip
FASTER_MEMORY = [
    ("v100-32gb", "a100-40gb"), ("a100-40gb", "a100-pcie-80gb"), ("a100-pcie-80gb", "a100-80gb"),
    ("h100-pcie", "h100-sxm"), ("h100-sxm", "h100-nvl"), ("h100-nvl", "h200"), ("h200", "b200"),
    ("rtx-3090", "rtx-4090"), ("rtx-4090", "rtx-5090"), ("l4", "a10g"), ("a10g", "rtx-a6000"),
    ("h200", "mi300x"),
]  # fmt: skip
FASTER_PORTS = [
    ("rtx-3090", "rtx-5090"), ("rtx-4090", "rtx-5090"), ("l40s", "h100-pcie"),
    ("a100-pcie-80gb", "a100-80gb"), ("h100-pcie", "h100-nvl"), ("h100-nvl", "h100-sxm"),
    ("h100-sxm", "gb200"), ("a100-80gb", "mi300x"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "key", "sign"),
    [
        (FASTER_PRODUCTS, "device.peak_flops_per_s.bfloat16", 1),
        (FASTER_MEMORY, "device.peak_bytes_per_s", 1),
        (FASTER_PORTS, "link.intra_node.s_per_byte", -1),
    ],
)
def test_newer_devices_are_faster(pairs: list[tuple[str, str]], key: str, sign: int) -> None:
    for slower, faster in pairs:
        assert sign * load_profile(faster).value(key) > sign * load_profile(slower).value(key), (
            slower, faster,
        )  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - {"cpu-local"}))
def test_figures_of_a_gpu_are_plausible(name: str) -> None:
    """A slip of a unit, of a factor of 1000 or of sparsity, leaves these bounds."""
    profile = load_profile(name)
    assert profile.cuda_names
    peaks = profile.rates_flops_per_s(peak=True)
    assert peaks["float64"] <= peaks["float32"] <= peaks["bfloat16"] <= peaks["float16"]
    assert peaks["float32"] <= peaks.get("tfloat32", peaks["float32"]) <= peaks["float16"]
    assert 2**34 <= profile.value("device.memory_bytes") < 2**38
    assert 2e11 < profile.value("device.peak_bytes_per_s") < 1e13
    assert 60 < peaks["float16"] / profile.value("device.peak_bytes_per_s") < 500
    for key in profile.quantities:
        if "achieved" in key or "attention" in key:
            assert 0.1 < profile.value(key) <= 1, key
    inside, across = profile.link("intra_node"), profile.link("inter_node")
    assert 5e8 < 1 / across.s_per_byte < 1 / inside.s_per_byte < 1e12
    assert 1e-6 < inside.latency_s <= across.latency_s < 1e-4
