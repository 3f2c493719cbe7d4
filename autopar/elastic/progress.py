"""How far a run is, as its checkpoints record it.

step                 batches trained; `autopar.load` returns it
extra["resilient"]
    n_samples        rows of global batches trained, over all epochs: the global sample cursor
    epoch            epochs complete
    n_ranks, mesh    of the ranks that saved
    plan             SHA-256 of their plan, as `sha256sum` says of its file
    n_restarts       how often torchrun had started them again
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import StateError
from autopar.module import Loaded, ParallelModule

KEY = "resilient"


@dataclass
class Progress:
    """Batches and rows trained, and epochs complete."""

    n_steps: int = 0
    n_samples: int = 0
    epoch: int = 0

    def count(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """A global batch was trained."""
        self.n_steps += 1
        self.n_samples += _n_rows(batch)

    def is_over(self, n_steps: int | None, epochs: int | None) -> bool:
        """Whether one of the two, None for no limit, is reached."""
        steps_done = n_steps is not None and self.n_steps >= n_steps
        return steps_done or (epochs is not None and self.epoch >= epochs)

    def record(self, pm: ParallelModule) -> dict[str, Any]:
        """The `extra` of a checkpoint."""
        data = pm.plan.data
        found = {
            "n_samples": self.n_samples, "epoch": self.epoch, "n_ranks": prod(data.mesh.shape),
            "mesh": list(data.mesh.shape), "plan": sha256(data.to_json().encode()).hexdigest(),
            "n_restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        }  # fmt: skip
        return {KEY: found}

    def resume(self, step: int, extra: Mapping[str, Any], source: str) -> None:
        """Go on where a checkpoint was saved.

        Raises `StateError` if it is none of a resilient run.
        """
        found = extra.get(KEY)
        if not isinstance(found, dict):
            raise StateError(
                f"a checkpoint of {source} was not saved by autopar.resilient",
                hint="use another folder, or load it with autopar.load",
            )
        self.n_steps, self.n_samples, self.epoch = step, found["n_samples"], found["epoch"]


def _n_rows(batch: Mapping[str, Any] | Sequence[Any]) -> int:
    """Rows of the global batch: what a loader of autopar says, else the first dim of a tensor."""
    mark = batch.get("batch") if isinstance(batch, Mapping) else None
    if isinstance(mark, Loaded):
        return mark.n_rows - mark.n_padded
    leaves = pytree.tree_leaves(batch)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
