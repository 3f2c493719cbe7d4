"""The cost model of a published run."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.cost.hardware import Profile, link_hardware, load_profile
from autopar.cost.published.rows import PublishedRun
from autopar.cost.transformer import LayerModel, StepModel, TransformerMachine

_DEVICES_PER_NODE = 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def step_model(row: PublishedRun, profile: Profile | None = None) -> StepModel:
    """The model of a run's step on its hardware, or on `profile` instead."""
    profile = profile if profile is not None else load_profile(row.profile)
    if row.software.new_attention:
        profile = _with_new_attention(profile)
    each = int(row.overrides.get("devices_per_node", _DEVICES_PER_NODE))
    dtype = _DTYPES[row.dtype]
    links = tuple(
        replace(profile.link(name), s_per_byte=row.overrides[key])
        if (key := f"link.{name}.s_per_byte") in row.overrides
        else profile.link(name)
        for name in ("inter_node", "intra_node")
    )
    layer = LayerModel(row.shape, row.recipe, row.software, dtype.itemsize)
    experts = row.shape.experts
    n_chosen = experts.chosen if experts and row.software.thrifty_dispatch else 0
    hardware = link_hardware(profile, links, dtype)
    return StepModel(layer, TransformerMachine(hardware, each, row.recipe, dtype, n_chosen))


def _with_new_attention(profile: Profile) -> Profile:
    """The profile with attention at the rate of kernels made for the device, if it is known."""
    found = {
        f"device.attention_fraction.{phase}": profile.quantities[key]
        for phase in ("forward", "backward")
        if (key := f"device.new_attention_fraction.{phase}") in profile.quantities
    }
    return replace(profile, quantities={**profile.quantities, **found})
