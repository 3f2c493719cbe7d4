"""How a parallel module may be called: the form of a batch, options, the modes of torch around it.

An option may have the name of an input: `weight` of `pm.step`, and a forward with a `weight`. Such
a call is refused unless the batch is one dict, with options beside it: `pm.step(batch, weight=2)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import BatchError, NotSupportedError, OptionError
from autopar.module.agreement import Given
from autopar.module.batches import Loaded, refuse_loaded

ONE = float("1.0")  # the default weight: another object than a 1.0 that a caller gives
# Option -> what it is and which values no input has; other values may be meant for an input.
_OPTIONS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "batch": ('"global" or "local"', lambda v: isinstance(v, (str, Loaded))),
    "outputs": ("a function", callable),
    "gather": ('"last" or "all"', lambda v: isinstance(v, str)),
}


def one_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The batch of a call: all positional or all by keyword. Raises `BatchError` for a mix."""
    if args and kwargs:
        raise BatchError(
            f"{len(args)} positional inputs and keyword inputs {sorted(kwargs)} in one call",
            hint="pass all by keyword, as in the planned batch",
        )
    refuse_loaded(kwargs)
    return args if args else kwargs


def one_dict(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], planned: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The batch of `pm.step(batch)`, if it is a dict with keys of the planned one.

    None for any other call: a model may take a dict as its only input. `planned` is by path.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return None
    given = dict(args[0].items())
    return given if given.keys() & _top(planned) else None


def check_options(
    call: str,
    options: Mapping[str, Any],
    model: nn.Module,
    planned: Mapping[str, Any],
    is_one_dict: bool,
) -> None:
    """Raise `OptionError` for an option of `pm.step` or `pm(...)` that may be meant as an input.

    `options` are those that were given.
    """
    for name, value in options.items():
        kind, is_sure = _OPTIONS.get(name, ("", lambda _: False))
        if is_sure(value) or (is_one_dict and not kind):
            continue
        where = ""
        if name in _top(planned):
            where = f", and `{name}` is an input of the planned batch"
        elif name in inspect.signature(model.forward).parameters:
            where = f", and {type(model).__name__}.forward has a parameter `{name}`"
        if where or kind:
            raise OptionError(
                f"{name}={_shown(value)}: `{name}` is an option of {call}"
                + (f", {kind}" if kind else "")
                + where,
                hint=_way_out(call, name, planned),
            )


def weight_of(value: Any, planned: Mapping[str, Any]) -> float:
    """The option `weight` as a number. Raises `OptionError` for what is none."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    raise OptionError(
        f"weight={_shown(value)}: `weight` is an option of pm.step, a number that multiplies the "
        "gradients",
        hint=_way_out("pm.step", "weight", planned),
    )


def _top(planned: Mapping[str, Any]) -> set[str]:
    return {path.partition(".")[0] for path in planned}


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (str, Real, type(None))) else type(value).__name__


def _way_out(call: str, name: str, planned: Mapping[str, Any]) -> str:
    as_dict = (
        f"pass the batch as one dict, with options beside it: {call}({{..., {name!r}: value}}) for "
        f"the input, {call}({{...}}, {name}=value) for the option"
    )
    if all(key.isdigit() for key in _top(planned)):
        return f"pass inputs by position: {call}(value); or plan with a dict, and then {as_dict}"
    return as_dict


def check_step_mode(batch: str) -> None:
    """Raise `OptionError` if `step` cannot compute gradients, or for a wrong option `batch`."""
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
