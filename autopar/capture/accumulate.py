"""Gradient accumulation: n microbatches of a loss that is not a sum over rows.

A contrastive loss compares all rows, batch norm takes statistics over them, a load-balancing loss
multiplies two means. Splitting the batch changes such a loss, so the planner never does it on its
own. If the user asks for n microbatches, autopar does what a loop over `batch.chunk(n)` does:

    microbatch i    rows [i·B/n, (i+1)·B/n); the program is captured on one microbatch
    loss            mean of the microbatches' losses                            (`mean_loss`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.capture.builder import Builder
from autopar.capture.outputs import Outputs
from autopar.errors import BatchError, CaptureError
from autopar.program.graph import Accumulation, flatten_inputs, row_dims

aten = torch.ops.aten


def accumulation_of(
    example_inputs: Mapping[str, Any] | Sequence[Any], n: int, batch_dims: Mapping[str, int | None]
) -> Accumulation:
    """How to split a batch into `n` microbatches.

    batch_dims    which dim of an input has the rows (the option of this name)

    Raises `BatchError` if `n` does not divide the number of rows.
    """
    leaves = flatten_inputs(example_inputs)
    shapes = {k: tuple(v.shape) for k, v in leaves.items() if isinstance(v, torch.Tensor)}
    dims, size = row_dims(shapes, batch_dims)
    if size % n:
        below, above = size // n * n, (size // n + 1) * n
        raise BatchError(
            f"a batch of {size} rows does not divide into {n} microbatches; "
            + (f"{below} and {above} would" if below else f"{above} would"),
            hint="choose microbatches that divide the batch, or drop_last=True in the loader",
        )
    return Accumulation(n, dims)


def first_rows(
    example_inputs: Mapping[str, Any] | Sequence[Any], accumulation: Accumulation
) -> Mapping[str, Any] | Sequence[Any]:
    """The inputs of the first microbatch, in the structure of `example_inputs`."""
    return microbatch(example_inputs, accumulation, 0)


def microbatch(
    example_inputs: Mapping[str, Any] | Sequence[Any], accumulation: Accumulation, index: int
) -> Mapping[str, Any] | Sequence[Any]:
    """The inputs of one microbatch, in the structure of `example_inputs`."""
    mapping = isinstance(example_inputs, Mapping)
    structure = pytree.tree_structure(dict(example_inputs) if mapping else tuple(example_inputs))
    rows = accumulation.rows(flatten_inputs(example_inputs), index)
    built: Mapping[str, Any] | Sequence[Any] = pytree.tree_unflatten(rows.values(), structure)
    return built


def of_microbatch(
    error: CaptureError,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    accumulation: Accumulation,
) -> CaptureError:
    """The error of a trace of one microbatch, with how many rows that has, and what was cut."""
    dims = {path: dim for path, dim in accumulation.dims.items() if dim is not None}
    if not dims:
        return error
    leaves, first = flatten_inputs(example_inputs), next(iter(dims))
    size = leaves[first].shape[dims[first]]
    cut = ", ".join(f"dim {dim} of `{path}`" for path, dim in dims.items())
    return CaptureError(
        f"{error.what}\n  traced on one of {accumulation.n} microbatches, with "
        f"{size // accumulation.n} of {size} rows; cut were {cut}",
        where=error.where,
        hint=f"batch_dims={{{[*dims][-1]!r}: None}} for an input that has no rows; fewer "
        "microbatches, or a forward for any number of rows"
        + (f"; else {error.hint}" if error.hint and "without autopar" not in error.hint else ""),
    )


def mean_loss(builder: Builder, outputs: Outputs, n: int) -> Outputs:
    """Divide the loss by `n`, so that the losses of `n` microbatches add up to their mean."""
    loss = outputs.loss
    assert loss is not None, "microbatches are of training"
    builder.origin = loss
    part = builder.op(aten.mul.Scalar, loss, 1 / n)
    tensors = tuple(part if t is loss else t for t in outputs.tensors)
    return replace(outputs, loss=part, tensors=tensors)
