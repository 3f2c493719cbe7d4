"""What of a batch decides the graph: its keys, structure, shapes, dtypes, and what is no tensor.

A batch with another signature is captured anew from the user's model, so it computes what the model
would: a label of another dtype is not cast, a key the model does not take is its `TypeError`. If
the model does not accept the batch, or it gives other operators than the plan places, the error
says how the batch differs from the planned one.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import accepted
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    NotSupportedError,
    OptionError,
)
from autopar.module.batches import Given
from autopar.module.fingerprints import Fingerprint, fingerprints
from autopar.module.loaded import refuse_loaded
from autopar.program import Program, flatten_inputs

Signature = tuple[tuple[str, Any], ...]


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


def signature_of_call(batch: Given, precision: str) -> Signature:
    """The signature; with precision "fp64" floating inputs of any dtype are alike (lifted)."""
    found: dict[str, Any] = {}
    for path, leaf in flatten_inputs(batch).items():
        if isinstance(leaf, Tensor):
            lifted = precision == "fp64" and leaf.is_floating_point()
            dtype = torch.float64 if lifted else leaf.dtype
            found[path] = (tuple(leaf.shape), str(dtype))
        else:
            found[path] = repr(leaf)
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    nested = {f"{key}.": str(pytree.tree_structure(v)) for key, v in items}
    return tuple(sorted((found | nested).items()))


def refuse_unlike(
    error: AutoparError, model: nn.Module, planned: Mapping[str, Fingerprint], given: Given
) -> AutoparError:
    """The error for a batch that the model or the plan does not take.

    It says how the batch differs from the planned one. It is `error` if only shapes differ.
    """
    found = fingerprints(given, with_content=False)
    missing, unknown = sorted(planned.keys() - found), sorted(found.keys() - planned)
    lines = [
        f"`{path}` is {form.form}, planned as {planned[path].form}"
        for path, form in found.items()
        if path in planned and planned[path] != form
    ]
    parts = [f"lacks {missing}"] if missing else []
    parts += [f"has {unknown} besides"] if unknown else []
    if not parts and not lines:
        return error
    keys = f"the batch {' and '.join(parts)}; it has {sorted(found)}"
    reason = str(error).split("\n  hint: ")[0].splitlines()
    taker = "model" if isinstance(error, CaptureError) else "plan"
    what = [keys if parts else f"the {taker} does not take this batch:", *lines, *reason]
    return BatchError(
        "\n  ".join(what), hint=f"the plan was made for {sorted(planned)}; {_takes(model)}"
    )


def keys_of_model(model: nn.Module, planned: Mapping[str, Fingerprint], given: Given) -> Given:
    """What `model.forward` takes of a batch that may hold keys that only the loss reads.

    Raises `BatchError` for keys that neither the model takes nor the planned batch had.
    """
    if not isinstance(given, Mapping):
        return accepted(model, tuple(given), {})[0]
    _, taken = accepted(model, (), dict(given))
    of_loss = {path.split(".")[0] for path in planned}
    unknown = sorted(given.keys() - taken.keys() - of_loss)
    if unknown:
        raise BatchError(
            f"the batch has {unknown} besides; it has {sorted(given)}",
            hint=f"the plan was made for {sorted(of_loss)}; {_takes(model)}",
        )
    return taken


def warn_of_unread(program: Program, model: nn.Module, given: Given) -> None:
    """Warn of keys that neither the model takes nor the loss reads: they may be misspelled."""
    if not isinstance(given, Mapping):
        return
    _, of_model = accepted(model, (), dict(given))
    read = {n.name for n in program.graph.nodes if n.op == "placeholder" and n.users}
    if program.prologue is not None:
        read |= {n.name for n in program.prologue.graph.graph.nodes if n.users}
    names = {info.path: name for name, info in program.inputs.items()}
    unread = [p for p, n in names.items() if n not in read and p.split(".")[0] not in of_model]
    if unread:
        warnings.warn(
            f"the batch has {unread}, which neither the loss reads nor {_takes(model)}",
            stacklevel=4,
        )


def _takes(model: nn.Module) -> str:
    names = ", ".join(inspect.signature(model.forward).parameters)
    return f"{type(model).__name__}.forward takes ({names})"
