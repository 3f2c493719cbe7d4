"""Memory as the device sees it: allocated, reserved, margin.

    allocated   tensors that are alive, and workspaces of libraries (`workspace.py`)
    reserved    (allocated + stranded) / (1 - share): what torch's allocator has taken from the
                driver for them; a stranded block is free and too small for what is alive
    margin      what the process holds beside: CUDA context, NCCL's buffers

`share` is what is reserved and not allocated at the peak, by the allocator's setting (`SHARES`):

    default        4%: out-of-memory reports of torch show 0.5% (SVD_Xtend issue 39) to 9%, and 28%
                   (trl issue 3436). Pieces of a segment cannot join those of another. Peaks of
                   61.7 and 42.7 GB reserved 67.7 and 48.8 (NeMo-RL pull request 926).
    expandable     1%, assumed: one segment grows by pages of 2 MiB, so all free pieces can join
                   (pytorch pull request 96995). 16.4 GiB became 10.8 (torchtune issue 1185), 127 GB
                   96.6 (cosmos-rl pull request 388).

The margin of a hardware profile covers the default share and what is held beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autopar.cost.hardware import Hardware
from autopar.cost.memory.workspace import workspace_bytes

Setting = Literal["default", "expandable"]
SHARES: dict[Setting, float] = {"default": 0.04, "expandable": 0.01}
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at the peak of a step."""

    allocated_bytes: float
    reserved_bytes: float
    margin_bytes: float


def footprint(
    allocated_bytes: float,
    hardware: Hardware,
    setting: Setting = "default",
    stranded_bytes: float = 0.0,
) -> Footprint:
    """What a peak of allocated bytes takes of a device. Only GPUs have the allocator."""
    share = SHARES[setting] if hardware.is_gpu else 0.0
    beside_bytes = _fraction_outside_allocator(hardware) * hardware.device.memory_bytes
    reserved_bytes = (allocated_bytes + stranded_bytes) / (1.0 - share)
    return Footprint(allocated_bytes, reserved_bytes, beside_bytes)


def footprint_of_plan(peak_bytes: float, hardware: Hardware) -> Footprint:
    """What a plan takes, whose peak counts no workspaces of libraries."""
    libraries = workspace_bytes(hardware.profile_name) if hardware.is_gpu else 0.0
    return footprint(peak_bytes + libraries, hardware)


def least_margin(setting: Setting, hardware: Hardware) -> float:
    """The least `memory_margin` of plans under a setting, rounded up to thousandths."""
    left = (1.0 - _fraction_outside_allocator(hardware)) * (1.0 - SHARES[setting])
    return min(math.ceil(1e3 * (1.0 - left)) / 1e3, hardware.memory_margin_fraction)


def _fraction_outside_allocator(hardware: Hardware) -> float:
    """The share of a device's memory that is not the allocator's."""
    share = SHARES["default"] if hardware.is_gpu else 0.0
    return max(hardware.memory_margin_fraction - share, 0.0)
