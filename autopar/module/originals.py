"""Weights loaded into the user's model after `autopar.parallelize`, which would train nothing.

The parallel module has copies of the weights. So `model.load_state_dict(...)` between
`autopar.parallelize` and the first step changes a model that does not train. It is found by the
version counters of the model's parameters. These are not checked after the first step, when it is
usual to load trained weights back; nor if somebody has trained the model, as a reference would be.
"""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.module.optimizers import has_trained
from autopar.runtime.state import StateError, together


class Originals:
    """The parameters of the user's model, as they were copied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = (model,)
        self._versions = WeakIdKeyDictionary({p: p._version for p in model.parameters()})
        self._is_first, self._is_known = True, False

    def seen(self) -> None:
        """Values were given to the parallel module, or taken out of it: check no more."""
        self._is_known = True

    def check(self) -> None:
        """Before the first step. Raises `StateError` on every rank if values were changed since."""
        if not self._is_first:
            return
        self._is_first = False
        with together():
            changed = [
                name
                for name, p in self._model[0].named_parameters()
                if not (self._is_known or p.is_meta)
                and p._version != self._versions.get(p)
                and p.grad is None
                and not has_trained(p)
            ]
            if changed:
                raise StateError(
                    f"`{changed[0]}`"
                    + (f" and {len(changed) - 1} more parameters" if len(changed) > 1 else "")
                    + " of the original model were changed after autopar.parallelize, which has "
                    "copied them: the change would train nothing",
                    hint="change the model before autopar.parallelize, or call "
                    "pm.load_state_dict(...); a reference should be a copy.deepcopy of the model",
                )
