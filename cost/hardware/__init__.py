"""hardware."""

from autopar.cost.hardware.hardware import (
    DEFAULT_PROFILE,
    MEASURED_RATIOS,
    Hardware,
    Profile,
    ProfiledDevice,
    Quantity,
    attention_flops_per_s,
    detect,
    flops_per_s,
    load_profile,
    on_links,
    resolve,
    resolve_on,
)
from autopar.cost.hardware.topology import LinkGroup, even_group, flat_group, group_on
from autopar.cost.hardware.what_if import changed, doublings, parse_changes, profile_of

__all__ = [
    "DEFAULT_PROFILE",
    "MEASURED_RATIOS",
    "Hardware",
    "LinkGroup",
    "Profile",
    "ProfiledDevice",
    "Quantity",
    "attention_flops_per_s",
    "changed",
    "detect",
    "doublings",
    "even_group",
    "flat_group",
    "flops_per_s",
    "group_on",
    "load_profile",
    "on_links",
    "parse_changes",
    "profile_of",
    "resolve",
    "resolve_on",
]
