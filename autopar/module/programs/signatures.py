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

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.capture import accepted
from autopar.errors import AutoparError, BatchError, CaptureError
from autopar.module.agreement import Fingerprint, Given, fingerprints
from autopar.precision import lifted_dtype
from autopar.program.graph import Program, flatten_inputs

Signature = tuple[tuple[str, Any], ...]


def signature_of_call(batch: Given, precision: str) -> Signature:
    """The signature; with precision "fp64" floating inputs of any dtype are alike (lifted)."""
    found: dict[str, Any] = {}
    for path, leaf in flatten_inputs(batch).items():
        if isinstance(leaf, Tensor):
            dtype = lifted_dtype(leaf.dtype) if precision == "fp64" else leaf.dtype
            found[path] = (tuple(leaf.shape), str(dtype))
        else:
            found[path] = repr(leaf)
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    nested = {f"{key}.": str(pytree.tree_structure(v)) for key, v in items}
    return tuple(sorted((found | nested).items()))


def refuse_empty(given: Given) -> None:
    """Raise `BatchError` for an input without rows: its mean loss would be 0 / 0."""
    for path, leaf in flatten_inputs(given).items():
        if isinstance(leaf, Tensor) and leaf.numel() == 0:
            raise BatchError(
                f"`{path}` is empty: its shape is {tuple(leaf.shape)}",
                hint="leave empty batches out, on every rank; drop_last=True of a loader does",
            )


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
