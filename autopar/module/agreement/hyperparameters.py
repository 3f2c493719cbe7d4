"""Learning rates and other settings of optimizers: equal on ranks that hold the same parameters.

A schedule that depends on the rank (by the length of its own loader) lets replicas drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import DivergenceError
from autopar.module.agreement.meeting import Due, compared
from autopar.module.agreement.settings import different
from autopar.runtime.groups import DistGroup, Group

N_FIRST = 3  # optimizer steps that are compared before every n-th is
_MOST_ELEMENTS = 16  # of a tensor that is compared; a learning rate has one


class Hyperparameters:
    """What this rank compares of the optimizers of one module.

    stage   the ranks that are compared; None: this rank is alone in its stage. A stage has
            parameters of its own: scripts may group them as they like, and make an optimizer for
            some stages only
    every   compare again each so many steps; None: only the first ones
    """

    def __init__(self, stage: Group | None, device: torch.device, every: int | None) -> None:
        self._stage, self._device, self._is_due = stage, device, Due(every)

    def check(self, optimizer: Optimizer) -> None:
        """Raise `DivergenceError` on every rank of the stage if one has other settings."""
        stage = self._stage
        if not isinstance(stage, DistGroup) or not self._is_due("optimizer", N_FIRST):
            return
        mine = {"optimizer": type(optimizer).__qualname__}
        for k, group in enumerate(optimizer.param_groups):
            mine |= {
                f"{name} of group {k}": _text(value)
                for name, value in group.items()
                if name != "params"
            }
        every = compared("optimizer", mine, self._device, stage)
        if every is not None:
            raise DivergenceError(
                f"{type(optimizer).__name__}.step() with other settings on other ranks:\n  "
                + "\n  ".join(different(every)),
                hint="give every rank the same schedule; one that counts the batches of a rank's "
                "own loader differs by rank",
            )


def _text(value: Any) -> str:
    """A setting as text that is equal in all processes; what is no number goes by its type."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() <= _MOST_ELEMENTS else f"{value.shape}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype)):
        return repr(value)
    return f"a {type(value).__qualname__}"
