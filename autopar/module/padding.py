"""Is a batch with padding the same step as its rows alone? Found out before an epoch begins.

Whether padding counts is up to the model: a mean over labels skips those that are ignored, a mean
over rows does not, and a batch norm sees all rows. So two steps are run, and compared on every
rank:

    f(r_1 ... r_m)                  rows of the batch, as many as a program takes
    f(r_1 ... r_m, padding)         the same rows and at least as many of padding

Padding is exact if losses, gradients and new values of buffers are equal. Both steps run the plan
with every float as float64, where rounding is far below any term that counts. They draw the random
numbers of a row alike, because those depend on its position. Nothing is kept of either step; while
they run, they need 16 bytes for each parameter of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, BatchError
from autopar.module.agreement import Given
from autopar.module.programs import Built
from autopar.precision import widened
from autopar.program.graph import flatten_inputs

_TOLERANCE = 1e-10  # relative to the largest element of a tensor, and to that of all gradients
_HINT = (
    "drop_last=True, or a batch size that divides the rows of the dataset; padding is exact where "
    'the loss ignores it, as cross_entropy ignores labels of -100: pad={"labels": -100, ...}'
)


@dataclass(frozen=True)
class PaddingCheck:
    """One module on this rank.

    compiled   the lifted step of a batch, which changes the buffers that are given
    inputs     the inputs of a program, by placeholder
    shards     parameter name -> this rank's shard
    buffers    name -> buffer, of those that steps change
    row_dims   path -> the dim of the rows
    n_divisor  divides the rows of every batch
    """

    compiled: Callable[[Given, Mapping[str, Tensor]], Built]
    inputs: Callable[[Built, Given], dict[str, Tensor]]
    shards: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    row_dims: Mapping[str, int]
    n_divisor: int
    seed: int

    def run(self, given: Given, n_rows: int, n_padded: int) -> None:
        """Raise `BatchError` on every rank unless the last `n_padded` rows do not count."""
        n_real, unit = n_rows - n_padded, self.n_divisor
        n_kept = max(n_rows // unit // 2, 1) * unit
        n_beside = max(n_rows - n_kept, unit)
        kept = torch.arange(n_kept) % n_real
        beside = n_real + torch.arange(n_beside) % n_padded
        try:
            alone = self._step(self._rows(given, kept))
            padded = self._step(self._rows(given, torch.cat([kept, beside])))
        except AutoparError as error:
            raise BatchError(
                f"padding could not be checked: {str(error).splitlines()[0]}", hint=_HINT
            ) from error
        found = self._differences(alone, padded)
        if found:
            raise BatchError(
                f"padding is not exact for this model: with {n_beside} rows of padding beside "
                f"{n_kept} rows of data,\n  " + "\n  ".join(found[:3]),
                hint=_HINT,
            )

    def _rows(self, given: Given, index: Tensor) -> Given:
        """The rows of a batch at `index`."""

        def of(path: str, value: Any) -> Any:
            dim = self.row_dims.get(path)
            return value if dim is None else value.index_select(dim, index.to(value.device))

        assert isinstance(given, Mapping)
        leaves = {path: of(path, v) for path, v in flatten_inputs(given).items()}
        if leaves.keys() != given.keys():
            raise BatchError("the inputs are nested", hint=_HINT)
        return leaves

    def _step(self, batch: Given) -> dict[str, Tensor]:
        """The loss, gradients and new buffers of a step that leaves no trace; on the CPU."""
        buffers = {name: widened(buffer.clone()) for name, buffer in self.buffers.items()}
        built = self.compiled(batch, buffers)
        leaves = {
            name: widened(shard.detach().clone()).requires_grad_(shard.requires_grad)
            for name, shard in self.shards.items()
        }
        inputs = {name: widened(value) for name, value in self.inputs(built, batch).items()}
        loss = built.executor.step(leaves, inputs, seed=self.seed)
        found = {"the loss": loss.detach()}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                found[f"the gradient of `{name}`"] = leaf.grad
        found |= {f"buffer `{name}`": value for name, value in buffers.items()}
        return {name: value.cpu() for name, value in found.items()}

    def _differences(self, alone: Mapping[str, Tensor], padded: Mapping[str, Tensor]) -> list[str]:
        """What differs on any rank, the loss first; the same on every rank."""
        largest = max((_largest(v) for k, v in alone.items() if "gradient" in k), default=0.0)
        found = {}
        for name, value in alone.items():
            other = padded[name]
            slack = _TOLERANCE * largest if "gradient" in name else 0.0
            off = _largest(widened(value) - widened(other))
            if not off <= _TOLERANCE * _largest(value) + slack:
                found[name] = (off, _largest(value))
        everyone: list[Any] = [found]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)
        merged = {name: pair for of_rank in reversed(everyone) for name, pair in of_rank.items()}
        return [
            f"{name} changes by {off:.3g}; without padding its largest element is {size:.3g}"
            for name, (off, size) in sorted(
                merged.items(), key=lambda item: (item[0] != "the loss", item[0])
            )
        ]


def _largest(value: Tensor) -> float:
    """The largest absolute value; NaN if there is one, 0 of no elements."""
    return value.abs().double().max().item() if value.numel() else 0.0
