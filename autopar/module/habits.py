"""Habits of training scripts that a parallel module cannot follow, each refused by name.

A parallel module holds parameters, and no layers: its program is generated. What walks over layers,
changes dtypes or devices, or wraps the module for other ranks would do nothing, or something else,
in silence. Every refusal says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar.errors import NotSupportedError


class PlannedModule(nn.Module):
    """A module whose layers are a generated program."""

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`, with another way to generate."""
        raise NotSupportedError(
            "generate() on a parallel module",
            hint="load pm.full_state_dict() into the original model on one process",
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        """Raise `NotSupportedError`: there are no layers to apply `fn` to."""
        raise NotSupportedError(
            "apply(fn) on a parallel module, which has no layers",
            hint="model.apply(fn) before autopar.parallelize",
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Behind `to`, `cuda`, `half`, `double` and the like: the plan has decided these."""
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is None:
                continue
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            wanted = fn(probe)
            if (wanted.dtype, wanted.device) != (probe.dtype, probe.device):
                raise NotSupportedError(
                    f"changing a parallel module from {probe.dtype} on {probe.device} to "
                    f"{wanted.dtype} on {wanted.device}",
                    hint="convert the model before autopar.parallelize",
                )
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """`DistributedDataParallel` asks for this first."""
        raise NotSupportedError(
            "DistributedDataParallel around a parallel module, which synchronises gradients itself",
            hint="call pm.step(**batch) on the module itself",
        )


class StepLoss(Tensor):
    """The loss of a step, detached. Its backward has run."""

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`: `pm.step` runs backward."""
        raise NotSupportedError(
            "loss.backward() after pm.step, which has run backward already",
            hint="leave it out; pm.step(..., weight=1 / n) scales gradients, for one of n batches",
        )

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: object = None
    ) -> str:
        return repr(self.as_subclass(Tensor))

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)
