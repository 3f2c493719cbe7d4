"""Profiles with changed figures: "what if this machine had ...", written as text.

    link.inter_node.s_per_byte=0.5x     half the present value: twice the bandwidth
    device.memory_bytes=1.92e11         this value
    device.peak_flops_per_s=2x          a key with a value per dtype, or per pass: all of them

Keys are those of a profile (`profile.py`). Commas join several changes, which hold at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.cost.hardware.hardware import detect
from autopar.cost.hardware.profile import DEFAULTS, Profile, Quantity, load_profile
from autopar.errors import OptionError
from autopar.mesh import Mesh

_CHANGE = re.compile(r"([\w.]+)=(\d*\.?\d+(?:e[+-]?\d\d?)?)(x?)", re.IGNORECASE)
_HINT = "as link.inter_node.s_per_byte=0.5x,device.peak_flops_per_s=2x"
# Rates, memory and cores must be above 0; a latency, a launch or s_per_byte may be 0.
_POSITIVE = (
    *("device.peak", "device.achieved", "device.attention", "device.new_attention"),
    *("device.memory_bytes", "node.cores_count"),
)
_IN_SWITCH = "link.intra_node.in_switch_s_per_byte"


@dataclass(frozen=True)
class Change:
    """The new value of one key, or the factor on its present value."""

    key: str
    number: float
    is_factor: bool

    def of(self, value: float) -> float:
        return value * self.number if self.is_factor else self.number


def parse_changes(text: str) -> tuple[Change, ...]:
    """The changes in `text`.

    Raises `OptionError` for a part that is not `KEY=NUMBER` or `KEY=NUMBERx`.
    """
    return tuple(_parse(word.strip()) for word in text.split(","))


def _parse(word: str) -> Change:
    match = _CHANGE.fullmatch(word)
    if match is None:
        raise OptionError(f"{word!r} changes nothing: write KEY=NUMBER or KEY=FACTORx", hint=_HINT)
    return Change(match[1], float(match[2]), bool(match[3]))


def changed(profile: Profile, text: str) -> Profile:
    """`profile` with the changes in `text`; its new name lists them.

    Raises `OptionError` for a key that the profile does not have, for a fraction above 1, and for
    a rate or memory of 0.
    """
    quantities = dict(profile.quantities)
    for change in parse_changes(text):
        for key in _keys(profile, change.key, change.is_factor):
            known = quantities.get(key)
            value = change.of(known.value if known else 0.0)
            if "_fraction" in key and value > 1:
                raise OptionError(
                    f"{key} would be {value:.3g}, a fraction above 1",
                    hint="change the peak that it is a fraction of",
                )
            if value == 0 and key.startswith(_POSITIVE):
                raise OptionError(f"{key} would be 0, so a step would never end")
            quantities[key] = Quantity(value, f"what if {text}")
    return replace(profile, name=f"{profile.name} with {text}", quantities=quantities)


def _keys(profile: Profile, key: str, is_factor: bool) -> list[str]:
    """The quantities that `key` names: itself, or its values per dtype or pass."""
    if found := [known for known in profile.quantities if key in (known, _family(known))]:
        return found
    if key in DEFAULTS and not is_factor:
        return [key]
    known = dict.fromkeys(map(_family, profile.quantities))
    raise OptionError(f"{profile.name} has no figure {key!r}", hint=f"it has {', '.join(known)}")


def _family(key: str) -> str:
    """A key without its dtype or pass: a last part without an underscore names no unit."""
    parent, _, last = key.rpartition(".")
    return key if "_" in last else parent


def profile_of(mesh: Mesh) -> Profile:
    """The profile of a mesh.

    Raises `OptionError` where the links and the device of the mesh are explicit.
    """
    if mesh.links is not None:
        raise OptionError(
            "explicit links and devices have no profile to change",
            hint="plan on a named hardware profile, or on a mesh with other links",
        )
    return load_profile(mesh.hardware or detect())


def doublings(profile: Profile) -> tuple[str, ...]:
    """Changes that make one part of the machine twice as fast and leave the others."""
    switch = f",{_IN_SWITCH}=0.5x" if _IN_SWITCH in profile.quantities else ""
    return (
        "device.peak_flops_per_s=2x",
        "device.peak_bytes_per_s=2x",
        f"link.intra_node.s_per_byte=0.5x{switch}",
        "link.inter_node.s_per_byte=0.5x",
    )
