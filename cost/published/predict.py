"""The cost model of a published run."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.cost.hardware import Quantity, Software, link_hardware, load_profile
from autopar.cost.published.rows import PublishedRun
from autopar.cost.transformer import LayerModel, StepModel, TransformerMachine

_DEVICES_PER_NODE = 8
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def step_model(row: PublishedRun, software: Software | None = None) -> StepModel:
    """The model of a run's step with its software, or with `software` instead."""
    software = software or row.software
    profile = load_profile(row.profile)
    if row.overrides:
        changed = {
            key: Quantity(value, "the row")
            for key, value in row.overrides.items()
            if key in profile.quantities
        }
        profile = replace(profile, quantities={**profile.quantities, **changed})
    profile = software.apply_to(profile)
    each = int(row.overrides.get("devices_per_node", _DEVICES_PER_NODE))
    dtype = _DTYPES[row.dtype]
    links = (profile.link("inter_node"), profile.link("intra_node"))
    layer = LayerModel(row.shape, row.recipe, software, dtype.itemsize)
    experts = row.shape.experts
    n_chosen = experts.chosen if experts and software.thrifty_dispatch else 0
    hardware = link_hardware(profile, links, dtype)
    return StepModel(
        layer, TransformerMachine(hardware, each, row.recipe, dtype, n_chosen, software)
    )
