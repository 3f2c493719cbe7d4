"""Refuses what is no module that can be traced (a function, a wrapper), and inputs of no graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from autopar.errors import CaptureError, NotSupportedError, OptionError
from autopar.program.graph import flatten_inputs

# Classes that wrap a module for several devices, by full name (importing some takes seconds).
_WRAPPERS = (
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
)
_PARALLEL = "autopar.module.parallel_module.ParallelModule"


def check_kind(model: Any) -> None:
    """Raise an error for a model that cannot be captured because of what it is.

    Raises `OptionError` for what is no module, `NotSupportedError` for a parallel module,
    a wrapper, parameters that are sharded already and TorchScript, `CaptureError` for a module
    without shapes. No collective: every rank raises the same.
    """
    if isinstance(model, type):
        raise OptionError(
            f"the model is the class {model.__name__}, not a module",
            hint=f"pass an instance: {model.__name__}(...)",
        )
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            hint="put it into forward of a torch.nn.Module that has its parameters, and pass that",
        )
    for path, module in model.named_modules():
        _check_part(f"`{path}`" if path else "the model", module)


def _check_part(what: str, module: nn.Module) -> None:
    for name in (f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__):
        if name == _PARALLEL:
            raise NotSupportedError(
                f"{what} is a parallel module already",
                hint="use it as it is, or pass the original model, with "
                "model.load_state_dict(pm.full_state_dict()) for the weights of now",
            )
        if name in _WRAPPERS:
            raise NotSupportedError(
                f"{what} is wrapped in {name.rpartition('.')[2]}",
                hint="pass the module inside, `.module`: autopar shards it, and synchronises "
                "gradients itself",
            )
    held: tuple[Any, ...] = (*module._parameters.values(), *module._buffers.values())
    if any(map(is_lazy, held)):
        raise CaptureError(
            f"{what} is a {type(module).__name__} before its first call: its parameters have "
            "no shapes yet",
            hint="run one batch first: model(**example_inputs)",
        )
    if any(isinstance(p, DTensor) for p in held):
        raise NotSupportedError(
            f"{what} has parameters that are sharded already (DTensors, as of fully_shard)",
            hint="pass the model before it is sharded: autopar shards it",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise NotSupportedError(
            f"{what} is a TorchScript module",
            hint="pass the Python module that torch.jit.script or torch.jit.trace was given",
        )


def check_leaves(example_inputs: Mapping[str, Any] | Sequence[Any]) -> None:
    """Raise `OptionError` for an input of a kind that no graph and no plan can hold."""
    for path, leaf in flatten_inputs(example_inputs).items():
        if isinstance(leaf, (torch.Tensor, bool, int, float, str)):
            continue
        hint = _instead_of(leaf)
        if hint is not None:
            raise OptionError(
                f"input `{path}` is a {type(leaf).__name__}; inputs are tensors, numbers, texts, "
                "None, and dicts, lists and tuples of them",
                hint=hint,
            )


def _instead_of(leaf: Any) -> str | None:
    """What to pass in place of an input; None if the trace decides."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "make it a tensor: torch.as_tensor(value)"
    if isinstance(leaf, torch.Generator):
        return (
            "leave it out: pm.step draws from pm.stream, new numbers in each step, the same for "
            "every plan"
        )
    if isinstance(leaf, (torch.device, torch.dtype)):
        return "take it from a tensor in forward (`x.device`, `x.dtype`), or from the model"
    if isinstance(leaf, Enum):
        return "pass its value, or make it an attribute of the model"
    if dataclasses.is_dataclass(leaf):
        kind = type(leaf).__name__
        return f"call torch.export.register_dataclass({kind}) first, or pass a dict of its fields"
    if isinstance(leaf, Mapping):
        return "pass a dict: dict(value)"
    return None
