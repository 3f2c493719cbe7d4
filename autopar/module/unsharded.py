"""The user's model with the values of a parallel module: whole, on one process.

A copy, so that neither the parallel module nor the model that it was made from changes with it.
The values take the place of the model's own while it is copied: ties stay ties, what the model
holds beside tensors is copied as it is, and no tensor is in memory twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopar.errors import NotSupportedError


def unsharded(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `model` in evaluation mode, with `values` by the names of its state dict.

    Values take the model's dtypes. Buffers without a value are copied. The parameters have no
    gradients and ask for them as the model's do. Raises `NotSupportedError` if the model cannot be
    copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():  # a tied parameter once
        whole = values[name].to(parameter.dtype)
        memo[id(parameter)] = type(parameter)(whole, parameter.requires_grad)
    for name, buffer in model.named_buffers():
        if name in values:
            memo[id(buffer)] = values[name].to(buffer.dtype)
    try:
        return copy.deepcopy(model, memo).eval()
    except (TypeError, RuntimeError) as error:
        raise NotSupportedError(
            f"{type(model).__name__} cannot be copied: {error}",
            hint="load pm.full_state_dict() into a new model, on rank 0",
        ) from error


def write_configs(model: nn.Module, folder: Path) -> None:
    """Write `config.json` and `generation_config.json` of a model of transformers, if it has them.

    As its `save_pretrained`, which names the model's class in the config.
    """
    for name in ("config", "generation_config"):
        config: Any = copy.deepcopy(getattr(model, name, None))
        if not hasattr(config, "save_pretrained"):
            continue
        if hasattr(config, "architectures"):
            config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
