"""Rates of a device that one compares with published ones, days of training, free memory."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.cost.memory import Footprint, footprint_of_plan
from autopar.plans import Predicted

_SECONDS_A_DAY = 86400


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device; None where the batch has no tokens, or no rows.

    days_per_trillion_tokens  of the whole mesh
    free_bytes                of a device's memory, at the peak: neither reserved nor margin
    footprint                 what the peak takes of a GPU; None on CPUs, whose allocator keeps none
    """

    tokens_per_s: float | None
    samples_per_s: float | None
    flops_per_s: float
    days_per_trillion_tokens: float | None
    free_bytes: float
    device_bytes: float
    footprint: Footprint | None

    @staticmethod
    def of(predicted: Predicted, hardware: Hardware, n_ranks: int) -> DeviceRates:
        tokens_per_s, samples_per_s = predicted.tokens_per_s, predicted.samples_per_s
        device_bytes, peak_bytes = hardware.device.memory_bytes, predicted.peak_bytes
        takes = footprint_of_plan(peak_bytes, hardware) if hardware.is_gpu else None
        taken_bytes = takes.reserved_bytes + takes.margin_bytes if takes else peak_bytes
        return DeviceRates(
            tokens_per_s / n_ranks if tokens_per_s else None,
            samples_per_s / n_ranks if samples_per_s else None,
            predicted.mfu * hardware.peak_flops_per_s,
            1e12 / tokens_per_s / _SECONDS_A_DAY if tokens_per_s else None,
            device_bytes - taken_bytes,
            device_bytes,
            takes,
        )
