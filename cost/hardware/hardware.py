"""A mesh in numbers: its own links and device, or those of a profile: named, given or detected.

Planning uses rates of peak x achieved fraction; MFU divides by the peak.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from autopar.cost.hardware.profile import (
    Profile,
    load_profile,
    shipped_name,
    unit_part,
    where_else,
)
from autopar.cost.hardware.software import Software, load_software, software_of
from autopar.errors import NotSupportedError
from autopar.lengths import Lengths
from autopar.mesh import Device, Link, Mesh

DEFAULT_PROFILE = "cpu-local"
# How operators run: a kernel each; fused with their neighbours by a compiler, region by region; or
# in a software's own kernels, which may have the loss too (`passes/analysis/kernels.py`).
KernelMode = Literal["eager", "compiled", "fused", "fused+loss"]


@dataclass(frozen=True)
class ProfiledDevice(Device):
    """A device with rates for every dtype; `flops_per_s` is the rate of the resolved dtype.

    `rates_flops_per_s`: of matmuls. `attention_rates`: (forward, backward) of fused attention.
    `tf32_flops_per_s`: of float32 matmuls in TF32; None if the device has none.
    `float8_rate_ratio`: rate of matmuls in float8 / in bfloat16; None likewise.
    """

    rates_flops_per_s: tuple[tuple[torch.dtype, float], ...] = ()
    attention_rates: tuple[tuple[torch.dtype, tuple[float, float]], ...] = ()
    product_traffic_ratio: float = 0.0
    host_s: float = 0.0
    overlap_slowdown_fraction: float = 0.0
    profile_name: str = ""
    tf32_flops_per_s: float | None = None
    float8_rate_ratio: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A mesh in numbers: one link per axis and the device, for a model that computes in `dtype`.

    `peak_flops_per_s` is the datasheet's rate of the resolved dtype; `device.flops_per_s` is the
    achieved rate. By default a plan leaves `memory_margin_fraction` of the memory free.
    `interval_ratio`: a predicted step times and over it hold 80% of published ones; None where
    nothing is known (`software.py`).
    `kernels`: how operators run. `imbalance`, `lengths`, `software`: the options.
    """

    links: tuple[Link, ...]
    device: Device
    profile_name: str
    peak_flops_per_s: float
    memory_margin_fraction: float
    is_gpu: bool = False
    dtype: torch.dtype = torch.float32
    interval_ratio: float | None = None
    kernels: KernelMode = "eager"
    imbalance: float = 1.0
    lengths: Lengths = ()
    software: str = "autopar"

    @property
    def memory_limit_bytes(self) -> float:
        """The default memory limit of a plan, per device."""
        return self.limit_bytes(None, None)

    def limit_bytes(self, memory_limit: int | None, memory_margin: float | None) -> float:
        """The memory limit of a plan, per device, from the options of these names."""
        if memory_limit is not None:
            return memory_limit
        margin = self.memory_margin_fraction if memory_margin is None else memory_margin
        return self.device.memory_bytes * (1.0 - margin)


def resolve(mesh: Mesh, dtype: torch.dtype = torch.float32, software: str = "autopar") -> Hardware:
    """The links and the device of `mesh`, for a model that computes in `dtype` under a software.

    Explicit links and an explicit device take precedence. They hold for every dtype and leave no
    memory margin. Otherwise `mesh.hardware` names the profile; None detects it. On a mesh of one
    node all axes get the link inside the node.

    Raises:
        OptionError: there is no such profile, or its file is malformed.
        NotSupportedError: the profile has no rate for `dtype`.
    """
    if mesh.links is not None and mesh.device is not None:
        rate = mesh.device.flops_per_s
        numbers = mesh.links, mesh.device, "explicit", rate, 0.0
        kernels = _kernels_of(load_software(software))
        return Hardware(*numbers, dtype=dtype, kernels=kernels, software=software)
    name = mesh.hardware if mesh.hardware is not None else detect()
    return resolve_on(load_profile(name), mesh, dtype, software)


def resolve_on(
    profile: Profile,
    mesh: Mesh,
    dtype: torch.dtype = torch.float32,
    software: str = "autopar",
) -> Hardware:
    """`resolve` for a mesh of devices of this profile."""
    runs = software_of(software, is_gpu=bool(profile.cuda_names))
    profile = runs.apply_to(_share_cores(profile, mesh.devices_per_node))
    intra, inter = profile.link("intra_node"), profile.link("inter_node")
    between = intra if mesh.nodes == 1 else inter
    links = (*(between for _ in mesh.shape[1:]), intra)
    found = link_hardware(profile, links, dtype)
    ratio = runs.interval_ratio(profile.name)
    return replace(found, interval_ratio=ratio, kernels=_kernels_of(runs), software=software)


def _kernels_of(runs: Software) -> KernelMode:
    if not runs.fused_kernels:
        return "eager"
    return "fused+loss" if runs.fuses_loss else "fused"


def link_hardware(profile: Profile, links: tuple[Link, ...], dtype: torch.dtype) -> Hardware:
    """A profile's device with the given links.

    Raises `NotSupportedError` for a dtype without a rate.
    """
    achieved, peak = _rates(profile), _rates(profile, peak=True)
    if dtype not in achieved:
        raise _no_rate(profile.name, dtype, achieved)
    device = ProfiledDevice(
        flops_per_s=achieved[dtype],
        bytes_per_s=profile.value("device.peak_bytes_per_s")
        * profile.value("device.achieved_bandwidth_fraction"),
        memory_bytes=profile.value("device.memory_bytes"),
        launch_s=profile.value("device.launch_s"),
        rates_flops_per_s=tuple(achieved.items()),
        attention_rates=tuple(_attention_rates(profile, achieved, peak).items()),
        product_traffic_ratio=profile.optional("device.product_traffic_ratio") or 0.0,
        host_s=profile.optional("device.host_s") or 0.0,
        overlap_slowdown_fraction=profile.optional("device.overlap_slowdown_fraction") or 0.0,
        profile_name=profile.name,
        tf32_flops_per_s=profile.rates_flops_per_s().get("tfloat32"),
        float8_rate_ratio=profile.optional("device.float8_rate_ratio"),
    )
    margin = profile.value("device.memory_margin_fraction")
    is_gpu = bool(profile.cuda_names)
    return Hardware(links, device, profile.name, peak[dtype], margin, is_gpu, dtype)


def _share_cores(profile: Profile, ranks_per_node: int) -> Profile:
    """The profile of one rank, slowed by ranks / cores where a node has more ranks than cores."""
    n_cores = profile.optional("node.cores_count")
    if n_cores is None or ranks_per_node <= n_cores:
        return profile
    turns = ranks_per_node / n_cores
    scaled = {}
    for key, quantity in profile.quantities.items():
        value, unit = quantity.value, unit_part(key)
        if unit.endswith("_per_s"):
            value /= turns
        elif unit.endswith(("_s", "_per_byte")):
            value *= turns
        scaled[key] = replace(quantity, value=value)
    return replace(profile, quantities=scaled)


def flops_per_s(device: Device, dtype: torch.dtype | None) -> float:
    """The achieved matmul rate of `device` for `dtype`; an explicit device has one rate for all.

    Raises `NotSupportedError` for a dtype without a rate.
    """
    if dtype is None or not isinstance(device, ProfiledDevice):
        return device.flops_per_s
    for known, rate in device.rates_flops_per_s:
        if known == dtype:
            return rate
    raise _no_rate(device.profile_name, dtype, dict(device.rates_flops_per_s))


def attention_flops_per_s(device: Device, dtype: torch.dtype | None) -> tuple[float, float]:
    """(forward, backward) rates of fused attention; the matmul rate where none is known.

    Raises `NotSupportedError` as `flops_per_s` does.
    """
    rate = flops_per_s(device, dtype)
    if isinstance(device, ProfiledDevice) and dtype is not None:
        return dict(device.attention_rates).get(dtype, (rate, rate))
    return rate, rate


def detect() -> str:
    """The profile name of this process's CUDA device, or `cpu-local` without one.

    A GPU without a profile also falls back to `cpu-local`, with a warning.
    """
    if not torch.cuda.is_available():
        return DEFAULT_PROFILE
    found = torch.cuda.get_device_name(0)
    if (name := shipped_name(found)) is not None:
        return name
    warnings.warn(
        f"no hardware profile matches {found!r}; planning for {DEFAULT_PROFILE}. "
        f"Give Mesh(hardware=...); {where_else(found)}",
        stacklevel=2,
    )
    return DEFAULT_PROFILE


def _rates(profile: Profile, *, peak: bool = False) -> dict[torch.dtype, float]:
    """Matmul rates by torch dtype; float32 uses TF32 if this process allows it for matmuls."""
    rates = profile.rates_flops_per_s(peak=peak)
    tensor_float_32 = rates.pop("tfloat32", None)
    if tensor_float_32 is not None and torch.get_float32_matmul_precision() != "highest":
        rates["float32"] = tensor_float_32
    return {getattr(torch, name): rate for name, rate in rates.items()}


def _attention_rates(
    profile: Profile, achieved: Mapping[torch.dtype, float], peak: Mapping[torch.dtype, float]
) -> dict[torch.dtype, tuple[float, float]]:
    """(forward, backward) rates of fused attention by dtype.

    No fused kernel computes float32 or float64 in tensor cores, so those get the matmul rate.
    """
    shares = [profile.optional(f"device.attention_fraction.{p}") for p in ("forward", "backward")]
    rates = {}
    for dtype in (torch.float16, torch.bfloat16):
        if dtype in achieved:
            forward, backward = (
                achieved[dtype] if share is None else peak[dtype] * share for share in shares
            )
            rates[dtype] = (forward, backward)
    return rates


def _no_rate(
    profile: str, dtype: torch.dtype, rates: Mapping[torch.dtype, float]
) -> NotSupportedError:
    known = ", ".join(str(d).removeprefix("torch.") for d in rates)
    return NotSupportedError(
        f"hardware profile {profile!r} has no matmul rate for {dtype}",
        hint=f"it has {known}; add device.peak_flops_per_s to a profile file of your own",
    )
