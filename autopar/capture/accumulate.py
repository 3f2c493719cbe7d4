"""Gradient accumulation: several microbatches of a loss that is no sum over rows.

A contrastive loss compares all rows, batch norm takes statistics of them, a load-balancing loss
multiplies two means. Splitting the batch changes what such a loss means, so the planner never does
it on its own. Asked for n microbatches, autopar does what a loop over `batch.chunk(n)` does: the
program is captured on the rows of one microbatch, microbatch i is rows [i·B/n, (i+1)·B/n), and
the loss is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.builder import Builder
from autopar.capture.outputs import Outputs
from autopar.errors import BatchError
from autopar.program import flatten_inputs, row_dims

aten = torch.ops.aten


@dataclass(frozen=True)
class Accumulate:
    """Capture for `n` microbatches; `batch_dims` says where inputs have their rows (option)."""

    n: int
    batch_dims: Mapping[str, int | None]

    def dims(self, example_inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, int]:
        """Input path -> the dim of its rows.

        Raises `BatchError` where they do not divide into the microbatches.
        """
        leaves = flatten_inputs(example_inputs)
        shapes = {k: tuple(v.shape) for k, v in leaves.items() if isinstance(v, torch.Tensor)}
        dims, size = row_dims(shapes, self.batch_dims)
        if size % self.n:
            raise BatchError(
                f"a batch of {size} rows does not divide into {self.n} microbatches",
                hint="choose microbatches that divide the batch, or drop_last=True in the loader",
            )
        return dims

    def rows(
        self, example_inputs: Mapping[str, Any] | Sequence[Any]
    ) -> Mapping[str, Any] | Sequence[Any]:
        """The inputs of the first microbatch, in their own structure."""
        dims = self.dims(example_inputs)
        tree = dict(example_inputs) if isinstance(example_inputs, Mapping) else [*example_inputs]
        leaves, spec = pytree.tree_flatten(tree)
        paths = flatten_inputs(example_inputs)
        cut = [
            leaf.narrow(dims[path], 0, leaf.shape[dims[path]] // self.n) if path in dims else leaf
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        built: Any = pytree.tree_unflatten(cut, spec)
        return built if isinstance(built, dict) else tuple(built)

    def mean(self, builder: Builder, outputs: Outputs) -> Outputs:
        """The loss as its part of the mean over microbatches."""
        loss = outputs.loss
        assert loss is not None, "microbatches are of training"
        builder.origin = loss
        part = builder.op(aten.mul.Scalar, loss, 1 / self.n)
        replaced: dict[fx.Node, fx.Node] = {loss: part}
        return replace(
            outputs, loss=part, tensors=tuple(replaced.get(t, t) for t in outputs.tensors)
        )
