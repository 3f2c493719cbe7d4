"""Hardware profiles: what a device and its links can do, every number with its source.

A profile is a TOML file. A quantity is a table of exactly `value` and `source`. Its key ends in
its unit (`_s`, `_per_s`, `_per_byte`, `_bytes`, `_fraction`, `_ratio`, `_count`). All values are
SI:

    [device]  memory_bytes, memory_margin_fraction, peak_bytes_per_s,
              achieved_bandwidth_fraction, launch_s,
              peak_flops_per_s.<dtype>, achieved_flops_fraction.<dtype>
    [link.intra_node], [link.inter_node]   latency_s, s_per_byte       of one device's own port

Optional quantities, and what holds without them (`DEFAULTS`):

    device.product_traffic_ratio         exposed memory time of a matmul, on top of its
                                         arithmetic / time to touch each operand once    0
    device.attention_fraction.forward    rate of fused attention's forward
                                         / peak flops_per_s                    matmul rate
    device.attention_fraction.backward   the same of its backward              matmul rate
    device.new_attention_fraction        both again, for kernels made for this device
      .forward, .backward                (cuDNN, FlashAttention-3); not all software
                                         calls them                            not applied
    device.host_s                        the interpreter's time to issue one operator    0
    device.overlap_slowdown_fraction     extra time of compute while a collective
                                         runs beside it, as a fraction                   0
    link.intra_node.in_switch_s_per_byte of one port while the switch sums; an all_reduce
                                         of n bytes moves (1 + 1/p) n
                                         (`cost/laws/formulas.py`)             no such switch
    backend.reduce_scatter_ratio         measured time / time by the formula, for backends
    backend.send_recv_ratio              that run a reduce_scatter or a message differently  1
    node.cores_count                     cores of a node whose ranks are processes; with
                                         more ranks than cores, ranks take turns   one per rank

Planning uses rates of peak x achieved fraction; MFU divides by the peak. `resolve` turns a mesh
into numbers: its own links and device, or those of a profile that is named, given or detected.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autopar.errors import NotSupportedError, OptionError
from autopar.mesh import Device, Link, Mesh
from autopar.units import format_bytes

PROFILE_FOLDER = Path(__file__).parent / "profiles"
DEFAULT_PROFILE = "cpu-local"

DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16")
_PHASES = ("forward", "backward")
_UNITS = ("_s", "_per_s", "_per_byte", "_bytes", "_fraction", "_ratio", "_count")
_SCALARS = (
    "device.memory_bytes",
    "device.memory_margin_fraction",
    "device.peak_bytes_per_s",
    "device.achieved_bandwidth_fraction",
    "device.launch_s",
    "link.intra_node.latency_s",
    "link.intra_node.s_per_byte",
    "link.inter_node.latency_s",
    "link.inter_node.s_per_byte",
)
# Optional quantities, and the value that means "unknown".
DEFAULTS: dict[str, float | None] = {
    "device.product_traffic_ratio": 0.0,
    "device.attention_fraction.forward": None,
    "device.attention_fraction.backward": None,
    "device.new_attention_fraction.forward": None,
    "device.new_attention_fraction.backward": None,
    "device.host_s": 0.0,
    "device.overlap_slowdown_fraction": 0.0,
    "link.intra_node.in_switch_s_per_byte": None,
    "backend.reduce_scatter_ratio": None,
    "backend.send_recv_ratio": None,
    "node.cores_count": None,
}
MEASURED_RATIOS = ("reduce_scatter", "send_recv")
_PER_DTYPE = ("device.peak_flops_per_s", "device.achieved_flops_fraction")


@dataclass(frozen=True)
class Quantity:
    """A number in SI units and the document or measurement it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Profile:
    """A checked profile. `quantities` maps the dotted key to its quantity.

    A CUDA device is this hardware if its name equals one of `cuda_names`. The whole name must be
    equal, because "NVIDIA H100" is one card and "NVIDIA H100 PCIe" another.
    """

    name: str
    quantities: Mapping[str, Quantity]
    cuda_names: tuple[str, ...] = ()

    def value(self, key: str) -> float:
        return self.quantities[key].value

    def optional(self, key: str) -> float | None:
        """The value of an optional key, or its default."""
        found = self.quantities.get(key)
        return DEFAULTS[key] if found is None else found.value

    def link(self, name: str) -> Link:
        """The link called `name`: `intra_node` or `inter_node`."""
        key = f"link.{name}"
        in_switch = self.optional(f"{key}.in_switch_s_per_byte") if name == "intra_node" else None
        ratios = {kind: self.optional(f"backend.{kind}_ratio") for kind in MEASURED_RATIOS}
        return Link(
            self.value(f"{key}.latency_s"), self.value(f"{key}.s_per_byte"), in_switch,
            ratios=tuple((kind, ratio) for kind, ratio in ratios.items() if ratio is not None),
        )  # fmt: skip

    def rates_flops_per_s(self, *, peak: bool = False) -> dict[str, float]:
        """Matmul rate by dtype name: achieved, or the peak."""
        rates = {}
        for dtype in DTYPES:
            if f"{_PER_DTYPE[0]}.{dtype}" in self.quantities:
                share = 1.0 if peak else self.value(f"{_PER_DTYPE[1]}.{dtype}")
                rates[dtype] = self.value(f"{_PER_DTYPE[0]}.{dtype}") * share
        return rates


@dataclass(frozen=True)
class ProfiledDevice(Device):
    """A device with rates for every dtype; `flops_per_s` is the rate of the resolved dtype.

    `rates_flops_per_s`: of matmuls. `attention_rates`: (forward, backward) of fused attention.
    `tf32_flops_per_s`: of float32 matmuls in TF32; None if the device has none.
    """

    rates_flops_per_s: tuple[tuple[torch.dtype, float], ...] = ()
    attention_rates: tuple[tuple[torch.dtype, tuple[float, float]], ...] = ()
    product_traffic_ratio: float = 0.0
    host_s: float = 0.0
    overlap_slowdown_fraction: float = 0.0
    profile_name: str = ""
    tf32_flops_per_s: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A mesh in numbers: one link per axis and the device.

    `peak_flops_per_s` is the datasheet's rate of the resolved dtype; `device.flops_per_s` is the
    achieved rate. By default a plan leaves `memory_margin_fraction` of the memory free.
    """

    links: tuple[Link, ...]
    device: Device
    profile_name: str
    peak_flops_per_s: float
    memory_margin_fraction: float

    @property
    def memory_limit_bytes(self) -> float:
        """The default memory limit of a plan, per device."""
        return self.device.memory_bytes * (1.0 - self.memory_margin_fraction)


def resolve(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Hardware:
    """The links and the device of `mesh`, for a model that computes in `dtype`.

    Explicit links and an explicit device take precedence. They hold for every dtype and leave no
    memory margin. Otherwise `mesh.hardware` names the profile; None detects it. On a mesh of one
    node all axes get the link inside the node.

    Raises:
        OptionError: there is no such profile, or its file is malformed.
        NotSupportedError: the profile has no rate for `dtype`.
    """
    if mesh.links is not None and mesh.device is not None:
        return Hardware(mesh.links, mesh.device, "explicit", mesh.device.flops_per_s, 0.0)
    name = mesh.hardware if mesh.hardware is not None else detect()
    return resolve_on(load_profile(name), mesh, dtype)


def resolve_on(profile: Profile, mesh: Mesh, dtype: torch.dtype = torch.float32) -> Hardware:
    """`resolve` for a mesh of devices of this profile."""
    profile = _sharing_cores(profile, mesh.devices_per_node)
    intra, inter = profile.link("intra_node"), profile.link("inter_node")
    links = (intra,) * len(mesh.shape) if mesh.nodes == 1 else (inter, intra)
    return on_links(profile, links, dtype)


def on_links(profile: Profile, links: tuple[Link, ...], dtype: torch.dtype) -> Hardware:
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
    )
    margin = profile.value("device.memory_margin_fraction")
    return Hardware(links, device, profile.name, peak[dtype], margin)


def _sharing_cores(profile: Profile, ranks_per_node: int) -> Profile:
    """The profile of one rank, slowed by ranks / cores where a node has more ranks than cores."""
    n_cores = profile.optional("node.cores_count")
    if n_cores is None or ranks_per_node <= n_cores:
        return profile
    turns = ranks_per_node / n_cores
    scaled = {}
    for key, quantity in profile.quantities.items():
        value, unit = quantity.value, _unit_part(key)
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
    for name in available_profiles():
        if found in load_profile(name).cuda_names:
            return name
    warnings.warn(
        f"no hardware profile matches {found!r}; planning for {DEFAULT_PROFILE}. "
        f"Give Mesh(hardware=...): one of {', '.join(available_profiles())} or a .toml file",
        stacklevel=2,
    )
    return DEFAULT_PROFILE


def available_profiles() -> tuple[str, ...]:
    """The names of the shipped profiles."""
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml")))


def load_profile(name_or_path: str | Path) -> Profile:
    """Read and check a profile: a shipped one by name, or a `.toml` file by path.

    Raises `OptionError` where there is no such profile, or its file is malformed.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise OptionError(f"there is no hardware profile file {path}")
        return _read(path)
    if name_or_path in available_profiles():
        return _shipped(name_or_path)
    hint = f"it is one of {', '.join(available_profiles())}, or the path of a .toml profile"
    raise OptionError(f"unknown hardware profile {name_or_path!r}", hint=hint)


@cache
def _shipped(name: str) -> Profile:
    return _read(PROFILE_FOLDER / f"{name}.toml")


def _read(path: Path) -> Profile:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"the hardware profile is not TOML: {error}", where=str(path)) from error
    name, cuda_names = content.pop("name", path.stem), content.pop("cuda_names", [])
    if not isinstance(name, str) or not isinstance(cuda_names, list):
        raise _malformed(path, "name must be a string and cuda_names a list of strings")
    quantities = dict(_quantities(content, "", path))
    _check_keys(quantities, path)
    return Profile(name, quantities, tuple(str(known) for known in cuda_names))


def _quantities(
    table: Mapping[str, Any], prefix: str, path: Path
) -> Iterator[tuple[str, Quantity]]:
    for name, content in table.items():
        key = f"{prefix}{name}"
        if not isinstance(content, dict):
            raise _malformed(path, f"{key} = {content!r} has no source: make it a table [{key}]")
        if "value" in content or "source" in content:
            yield key, _quantity(key, content, path)
        else:
            yield from _quantities(content, f"{key}.", path)


def _unit_part(key: str) -> str:
    """The part of a dotted key that names its unit; a dtype or phase at the end names none."""
    *parents, last = key.split(".")
    return parents[-1] if parents and last in (*DTYPES, *_PHASES) else last


def _quantity(key: str, table: Mapping[str, Any], path: Path) -> Quantity:
    unit_part = _unit_part(key)
    if not unit_part.endswith(_UNITS):
        raise _malformed(path, f"{key} names no unit: end it in one of {', '.join(_UNITS)}")
    if set(table) != {"value", "source"}:
        raise _malformed(path, f"[{key}] needs exactly value and source, not {sorted(table)}")
    value, source = table["value"], table["source"]
    if not isinstance(source, str) or not source.strip():
        raise _malformed(path, f"[{key}] has an empty source: name the page or measurement")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise _malformed(path, f"[{key}] value = {value!r} is not a number of at least 0")
    if unit_part.endswith("_fraction") and value > 1:
        raise _malformed(path, f"[{key}] value = {value} is a fraction above 1")
    return Quantity(float(value), source)


def _check_keys(quantities: Mapping[str, Quantity], path: Path) -> None:
    dtypes = [d for d in DTYPES if any(f"{key}.{d}" in quantities for key in _PER_DTYPE)]
    expected = {*_SCALARS, *(f"{key}.{dtype}" for key in _PER_DTYPE for dtype in dtypes)}
    if missing := sorted(expected - set(quantities)):
        raise _malformed(path, f"missing {', '.join(missing)}")
    if unknown := sorted(set(quantities) - expected - set(DEFAULTS)):
        known = ", ".join((*_SCALARS, *DEFAULTS))
        raise _malformed(path, f"unknown {', '.join(unknown)}; known are {known}")
    if not dtypes:
        raise _malformed(path, f"no {_PER_DTYPE[0]}.<dtype>, for any of {', '.join(DTYPES)}")
    nonzero = expected - {key for key in expected if key.endswith(("launch_s", "margin_fraction"))}
    for key in sorted(key for key in nonzero if not key.startswith("link.")):
        if quantities[key].value == 0:
            raise _malformed(path, f"[{key}] must be above 0")
    if quantities["device.memory_margin_fraction"].value == 1:
        held = format_bytes(quantities["device.memory_bytes"].value)
        raise _malformed(path, f"device.memory_margin_fraction = 1 leaves nothing of {held}")


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


def _malformed(path: Path, what: str) -> OptionError:
    return OptionError(
        f"malformed hardware profile: {what}",
        where=str(path),
        hint="every number is a table with value and source, its key ending in its unit",
    )
