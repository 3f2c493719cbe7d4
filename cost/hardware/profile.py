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
    device.float8_rate_ratio             rate of matmuls in float8 / in bfloat16   no float8
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
    link.intra_node.chunk_s              latency of a chunk of a collective, which passes
                                         the ranks like a pipeline
                                         (`cost/laws/collectives.py`)          whole buffers
    backend.reduce_scatter_ratio         measured time / time by the formula, for backends
    backend.send_recv_ratio              that run a reduce_scatter or a message differently  1
    node.cores_count                     cores of a node whose ranks are processes; with
                                         more ranks than cores, ranks take turns   one per rank

A plan carries the figures of a profile that is not shipped, so it needs no file of its maker's
(`figures_of`). Errors name keys, and never show the text of a file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cost.hardware.names import near_names, spelling_of
from autopar.errors import OptionError
from autopar.mesh import Figures, Link
from autopar.units import format_bytes

PROFILE_FOLDER = Path(__file__).parent / "profiles"

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
    "device.float8_rate_ratio": None,
    "device.attention_fraction.forward": None,
    "device.attention_fraction.backward": None,
    "device.new_attention_fraction.forward": None,
    "device.new_attention_fraction.backward": None,
    "device.host_s": 0.0,
    "device.overlap_slowdown_fraction": 0.0,
    "link.intra_node.in_switch_s_per_byte": None,
    "link.intra_node.chunk_s": None,
    "backend.reduce_scatter_ratio": None,
    "backend.send_recv_ratio": None,
    "node.cores_count": None,
}
MEASURED_RATIOS = ("reduce_scatter", "send_recv")
_MOST, _LEAST_FRACTION = 1e30, 1e-6
_COUNTED = ("_per_s", "_bytes", "_count")
_DIVISORS = ("device.achieved", "device.attention", "device.new_attention")
# The longest shipped profile has 7 kB, and keys of three parts.
_MOST_FILE_BYTES, _MOST_DOTS, _MOST_CHARACTERS = 2**18, 4, 200
_PER_DTYPE = ("device.peak_flops_per_s", "device.achieved_flops_fraction")


@dataclass(frozen=True)
class Quantity:
    """A number in SI units and the document or measurement it comes from."""

    value: float
    source: str


@dataclass(frozen=True)
class Profile:
    """A checked profile. `quantities` maps the dotted key to its quantity.

    A device is this hardware if torch calls it by one of `cuda_names` (also AMD's). The whole name
    counts, because "NVIDIA H100" is one card and "NVIDIA H100 PCIe" another.
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
        in_switch, chunk_s = (
            self.optional(f"{key}.{figure}") if name == "intra_node" else None
            for figure in ("in_switch_s_per_byte", "chunk_s")
        )
        ratios = {kind: self.optional(f"backend.{kind}_ratio") for kind in MEASURED_RATIOS}
        return Link(
            self.value(f"{key}.latency_s"), self.value(f"{key}.s_per_byte"), in_switch,
            chunk_s=chunk_s,
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


@cache
def available_profiles() -> tuple[str, ...]:
    """The names of the shipped profiles."""
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml")))


def shipped_name(given: str | Figures) -> str | None:
    """The shipped profile that is spelled so; None if there is none.

    A profile is known by its name and its `cuda_names`. Case, blanks and punctuation do not count.
    """
    if isinstance(given, Figures) or given in available_profiles():
        return None if isinstance(given, Figures) else given
    return next(
        (name for name in available_profiles() if spelling_of(given) in _spellings(name)), None
    )


def where_else(given: str) -> str:
    """What to write instead of a name that no shipped profile has, as a hint."""
    near = near_names(given, {name: _spellings(name) for name in available_profiles()})
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return (
        f"{meant}it is one of {', '.join(available_profiles())}, or the path of a .toml profile: "
        "`autopar calibrate` writes one of this machine, docs/reference/hardware.md says how to "
        "write one yourself"
    )


def load_profile(given: str | Path | Figures) -> Profile:
    """Read and check a profile: a shipped one by name (`shipped_name`), a `.toml` file by path, or
    a plan's figures.

    Raises `OptionError` where there is no such profile, or it is malformed.
    """
    if isinstance(given, Figures):
        return _figures_profile(given)
    if isinstance(given, Path) or given.endswith(".toml"):
        path = Path(given)
        if not path.is_file():
            raise OptionError(f"there is no hardware profile file {path}")
        return _read(path)
    name = shipped_name(given)
    if name is None:
        raise OptionError(f"unknown hardware profile {given!r}", hint=where_else(given))
    return _shipped(name)


def figures_of(profile: Profile) -> Figures:
    """What a plan carries of a profile that is not shipped."""
    values = ((key, quantity.value) for key, quantity in profile.quantities.items())
    return Figures(profile.name, tuple(values))


@cache
def _figures_profile(figures: Figures) -> Profile:
    where = f"the figures of {figures.name!r} in a plan"
    for key, value in figures.values:
        _check_value(key, value, where)
    quantities = {key: Quantity(value, "the plan's figure") for key, value in figures.values}
    _check_keys(quantities, where)
    return Profile(figures.name, quantities)


@cache
def _shipped(name: str) -> Profile:
    return _read(PROFILE_FOLDER / f"{name}.toml")


@cache
def _spellings(name: str) -> tuple[str, ...]:
    """How a shipped profile may be called: its name, then the names that torch gives the device."""
    return tuple(map(spelling_of, (name, *_shipped(name).cuda_names)))


def _read(path: Path) -> Profile:
    where = str(path)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise _malformed(where, f"it has more than {_MOST_FILE_BYTES:,} bytes")
        content = tomllib.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8, from byte {error.start} on"
        raise OptionError(f"the hardware profile is {reason}", where=where) from None
    except (ValueError, RecursionError) as error:
        # Other errors than TOMLDecodeError are of numbers and nesting without end.
        reason = str(error) if isinstance(error, tomllib.TOMLDecodeError) else type(error).__name__
        raise OptionError(f"the hardware profile is not TOML: {reason}", where=where) from None
    except OSError as error:
        raise OptionError(
            f"cannot read the hardware profile: {error.strerror}", where=where
        ) from error
    name, cuda_names = content.pop("name", path.stem), content.pop("cuda_names", [])
    texts = [name, *cuda_names] if isinstance(cuda_names, list) else [None]
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise _malformed(where, "name must be a string and cuda_names a list of strings")
    quantities = dict(_quantities(content, "", where))
    _check_keys(quantities, where)
    return Profile(name, quantities, tuple(cuda_names))


def _quantities(
    table: Mapping[str, Any], prefix: str, where: str
) -> Iterator[tuple[str, Quantity]]:
    for name, content in table.items():
        key = f"{prefix}{name}"
        if len(key) > _MOST_CHARACTERS or not key.isprintable():
            raise _malformed(where, f"the key {key[:_MOST_CHARACTERS]!r} is too long, or no text")
        if not isinstance(content, dict):
            raise _malformed(where, f"{key} has no source: make it a table [{key}]")
        if "value" in content or "source" in content:
            yield key, _quantity(key, content, where)
        elif key.count(".") > _MOST_DOTS:
            raise _malformed(where, f"[{key}] is nested too deeply")
        else:
            yield from _quantities(content, f"{key}.", where)


def unit_part(key: str) -> str:
    """The part of a dotted key that names its unit; a dtype or phase at the end names none."""
    *parents, last = key.split(".")
    return parents[-1] if parents and last in (*DTYPES, *_PHASES) else last


def _quantity(key: str, table: Mapping[str, Any], where: str) -> Quantity:
    _check_unit(key, where)
    if set(table) != {"value", "source"}:
        raise _malformed(where, f"[{key}] needs exactly value and source, not {sorted(table)[:5]}")
    value, source = table["value"], table["source"]
    if not isinstance(source, str) or not source.strip():
        raise _malformed(where, f"[{key}] has an empty source: name the page or measurement")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _malformed(where, f"[{key}] value is not a number of at least 0")
    _check_value(key, value, where)
    return Quantity(float(value), source)


def _check_unit(key: str, where: str) -> str:
    part = unit_part(key)
    if not part.endswith(_UNITS):
        raise _malformed(where, f"{key} names no unit: end it in one of {', '.join(_UNITS)}")
    return part


def _check_value(key: str, value: float, where: str) -> None:
    """Raises `OptionError` for a value that no device has; a least value is one to divide by."""
    part = _check_unit(key, where)
    if not 0 <= value < _MOST:
        shown = "too large" if abs(value) >= _MOST else f"{value:g}"
        raise _malformed(where, f"[{key}] value = {shown} is not a number of at least 0")
    if part.endswith("_fraction") and value > 1:
        raise _malformed(where, f"[{key}] value = {value:g} is a fraction above 1")
    if part.endswith(_COUNTED) and value < 1:
        raise _malformed(where, f"[{key}] value = {value:g} must be at least 1")
    if key.startswith(_DIVISORS) and value < _LEAST_FRACTION:
        raise _malformed(where, f"[{key}] value = {value:g} must be at least {_LEAST_FRACTION:g}")


def _check_keys(quantities: Mapping[str, Quantity], where: str) -> None:
    dtypes = [d for d in DTYPES if any(f"{key}.{d}" in quantities for key in _PER_DTYPE)]
    expected = {*_SCALARS, *(f"{key}.{dtype}" for key in _PER_DTYPE for dtype in dtypes)}
    if missing := sorted(expected - set(quantities)):
        raise _malformed(where, f"missing {', '.join(missing)}")
    if unknown := sorted(set(quantities) - expected - set(DEFAULTS)):
        known = ", ".join((*_SCALARS, *DEFAULTS))
        raise _malformed(where, f"unknown {', '.join(unknown)}; known are {known}")
    if not dtypes:
        raise _malformed(where, f"no {_PER_DTYPE[0]}.<dtype>, for any of {', '.join(DTYPES)}")
    if quantities["device.memory_margin_fraction"].value == 1:
        held = format_bytes(quantities["device.memory_bytes"].value)
        raise _malformed(where, f"device.memory_margin_fraction = 1 leaves nothing of {held}")


def _malformed(where: str, what: str) -> OptionError:
    return OptionError(
        f"malformed hardware profile: {what}",
        where=where,
        hint="every number is a table with value and source, its key ending in its unit",
    )
