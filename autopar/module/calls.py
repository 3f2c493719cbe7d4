"""How a parallel module may be called: the form of a batch, and the modes of torch around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.errors import BatchError, NotSupportedError, OptionError
from autopar.module.agreement import Given
from autopar.module.batches import refuse_loaded


def one_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The batch of a call: all positional or all by keyword. Raises `BatchError` for a mix."""
    if args and kwargs:
        raise BatchError(
            f"{len(args)} positional inputs and keyword inputs {sorted(kwargs)} in one call",
            hint="pass all by keyword, as in the planned batch",
        )
    refuse_loaded(kwargs)
    return args if args else kwargs


def check_step_mode(batch: Any) -> None:
    """Raise `OptionError` if `step` cannot compute gradients, or for a wrong option `batch`."""
    if not isinstance(batch, str):
        raise OptionError(
            f"batch={type(batch).__name__}: `batch` is an option of step",
            hint="pass inputs of this name by position: pm.step(value)",
        )
    if batch not in ("global", "local"):
        raise OptionError(f'batch={batch!r}: it is "global" or "local"')
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise OptionError(
            f"step under torch.{mode}(): there would be no gradients",
            hint="call pm.step outside of it; pm.loss(**batch) is the loss without gradients",
        )


def check_autocast(device: torch.device) -> None:
    """Raise `OptionError` under autocast, which would change the dtypes that were planned."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        raise OptionError(
            f"a parallel module under torch.autocast({device.type!r}, {dtype}): its program was "
            "planned in other dtypes",
            hint="call it outside; autopar.parallelize(..., precision=...) plans a step in "
            "bf16-autocast, bf16-mixed or fp16-mixed",
        )


def check_inputs(leaves: Mapping[str, Any]) -> None:
    """Raise `NotSupportedError` for an input that requires grad: a step gives it none."""
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            raise NotSupportedError(
                f"input `{path}` requires grad, and a step gives gradients to parameters only",
                hint=f"pass {path}.detach(); layers that compute it belong into the model, and so "
                "does an input that is trained, as an nn.Parameter",
            )


def check_planning_mode() -> None:
    """Raise `OptionError` under inference_mode, whose tensors can never be trained."""
    if torch.is_inference_mode_enabled():
        raise OptionError(
            "parallelize under torch.inference_mode(): its parameters could not be trained",
            hint="call it outside",
        )
