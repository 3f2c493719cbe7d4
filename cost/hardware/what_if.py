"""What if the machine had other figures: changes to a profile, as texts.

    link.inter_node.s_per_byte=0.5x     half of what it is: twice the bandwidth
    device.memory_bytes=1.92e11         this value
    device.peak_flops_per_s=2x          a key with a value per dtype, or per pass: all of them

Keys are those of a profile (`hardware.py`); several changes are joined by commas and hold at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.cost.hardware.hardware import DEFAULTS, Profile, Quantity, detect, load_profile
from autopar.errors import OptionError
from autopar.mesh import Mesh

_CHANGE = re.compile(r"([\w.]+)=(\d*\.?\d+(?:e[+-]?\d\d?)?)(x?)", re.IGNORECASE)
_HINT = "as link.inter_node.s_per_byte=0.5x,device.peak_flops_per_s=2x"
# What divides work or holds it; a latency, a launch or s_per_byte may be 0.
_POSITIVE = ("device.peak", "device.achieved", "device.attention", "device.memory_bytes")
_IN_SWITCH = "link.intra_node.in_switch_s_per_byte"


@dataclass(frozen=True)
class Change:
    """Of one key: its new value, or the factor to what it is."""

    key: str
    number: float
    is_factor: bool

    def of(self, value: float) -> float:
        return value * self.number if self.is_factor else self.number


def parse_changes(text: str) -> tuple[Change, ...]:
    """Raises `OptionError` for what is not `KEY=NUMBER` or `KEY=NUMBERx`."""
    return tuple(_parse(word.strip()) for word in text.split(","))


def _parse(word: str) -> Change:
    match = _CHANGE.fullmatch(word)
    if match is None:
        raise OptionError(f"{word!r} changes nothing: write KEY=NUMBER or KEY=FACTORx", hint=_HINT)
    return Change(match[1], float(match[2]), bool(match[3]))


def changed(profile: Profile, text: str) -> Profile:
    """`profile` with other figures; its name says which.

    Raises `OptionError` for a key that it does not have, or a fraction above 1.
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
                raise OptionError(f"{key} would be 0: what takes it would never end")
            quantities[key] = Quantity(value, f"what if {text}")
    return replace(profile, name=f"{profile.name} with {text}", quantities=quantities)


def _keys(profile: Profile, key: str, is_factor: bool) -> list[str]:
    """The quantities that `key` means: itself, or its values per dtype or pass."""
    if found := [known for known in profile.quantities if key in (known, _family(known))]:
        return found
    if key in DEFAULTS and not is_factor:
        return [key]
    known = dict.fromkeys(map(_family, profile.quantities))
    raise OptionError(f"{profile.name} has no figure {key!r}", hint=f"it has {', '.join(known)}")


def _family(key: str) -> str:
    """A key without its dtype or pass, which name no unit."""
    parent, _, last = key.rpartition(".")
    return key if "_" in last else parent


def profile_of(mesh: Mesh) -> Profile:
    """The profile of a mesh. Raises `OptionError` where its links and device are explicit."""
    if mesh.links is not None:
        raise OptionError(
            "explicit links and devices have no profile to change",
            hint="plan on a named hardware profile, or on a mesh with other links",
        )
    return load_profile(mesh.hardware or detect())


def doublings(profile: Profile) -> tuple[str, ...]:
    """Each part of the machine twice as fast, the others as they are."""
    switch = f",{_IN_SWITCH}=0.5x" if _IN_SWITCH in profile.quantities else ""
    return (
        "device.peak_flops_per_s=2x",
        "device.peak_bytes_per_s=2x",
        f"link.intra_node.s_per_byte=0.5x{switch}",
        "link.inter_node.s_per_byte=0.5x",
    )
