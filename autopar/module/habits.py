"""Habits of training scripts that a parallel module cannot follow, each refused by name.

The program is generated, so its layers are only shown (`layers.py`). What changes layers, dtypes or
devices, or wraps the module for other ranks would do nothing, or something else, in silence. Every
refusal says what to write instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from autopar.errors import NotSupportedError
from autopar.module.layers import Guarded


class PlannedModule(Guarded):
    """A module whose layers are a generated program."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupportedError(
            "saving a parallel module itself, of which this rank has a part",
            hint="autopar.save(pm, optimizer, path), or on rank 0 "
            "torch.save(pm.full_state_dict(), path); every rank calls full_state_dict()",
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`, with another way to generate."""
        raise NotSupportedError(
            "generate() on a parallel module",
            hint="load pm.full_state_dict() into the original model on one process",
        )

    def _no_state_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(
            "a hook on the state dict of a parallel module",
            hint="change what pm.state_dict() returns, and what pm.load_state_dict() is given",
        )

    register_state_dict_pre_hook = _no_state_hook
    register_state_dict_post_hook = _no_state_hook
    register_load_state_dict_pre_hook = _no_state_hook
    register_load_state_dict_post_hook = _no_state_hook

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
