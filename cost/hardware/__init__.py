"""What a device and its links can do, in numbers, and which links a group of ranks crosses.

Read `names.py` (how devices are called), `profile.py` (profiles), `software.py` (what runs on a
device, and what it reaches there), then `hardware.py` (a mesh resolved to rates and links). After
that come `topology.py` (the links of a group of ranks) and `what_if.py` (profiles with changed
figures). The shipped profiles are TOML files in `profiles/`, software in `stacks/`.

This is the lowest room of `cost`: it may import no other room of it, only what lies below
`cost`, such as `mesh.py`. It mainly hands on `Profile`, `Hardware` (made by `resolve`) and
`LinkGroup` (made by `group_on`).
"""

from autopar.cost.hardware.hardware import (
    DEFAULT_PROFILE,
    Hardware,
    KernelMode,
    ProfiledDevice,
    attention_flops_per_s,
    detect,
    flops_per_s,
    link_hardware,
    resolve,
    resolve_on,
)
from autopar.cost.hardware.profile import (
    MEASURED_RATIOS,
    PROFILE_FOLDER,
    Profile,
    Quantity,
    available_profiles,
    figures_of,
    load_profile,
    shipped_name,
)
from autopar.cost.hardware.software import (
    CONSTANTS,
    FEATURES,
    PAIR_ERROR,
    SOFTWARE_FOLDER,
    Loss,
    Software,
    available_software,
    load_software,
    share_under_matmul,
    software_of,
)
from autopar.cost.hardware.topology import LinkGroup, even_group, flat_group, group_on
from autopar.cost.hardware.what_if import changed, doublings, parse_changes, profile_of

__all__ = [
    "CONSTANTS",
    "DEFAULT_PROFILE",
    "FEATURES",
    "MEASURED_RATIOS",
    "PAIR_ERROR",
    "PROFILE_FOLDER",
    "SOFTWARE_FOLDER",
    "Hardware",
    "KernelMode",
    "LinkGroup",
    "Loss",
    "Profile",
    "ProfiledDevice",
    "Quantity",
    "Software",
    "attention_flops_per_s",
    "available_profiles",
    "available_software",
    "changed",
    "detect",
    "doublings",
    "even_group",
    "figures_of",
    "flat_group",
    "flops_per_s",
    "group_on",
    "link_hardware",
    "load_profile",
    "load_software",
    "parse_changes",
    "profile_of",
    "resolve",
    "resolve_on",
    "share_under_matmul",
    "shipped_name",
    "software_of",
]
