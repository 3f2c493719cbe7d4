"""Tensors that are written to after `autopar.parallelize`, where no program would read them.

Weights loaded into the user's model would train nothing.

The parallel module has copies of the weights. So `model.load_state_dict(...)` between
`autopar.parallelize` and the first step changes a model that does not train. It is found by the
version counters of the model's parameters and sums of their bits. These are not checked after the
first step, when it is usual to load trained weights back; nor if somebody has trained the model, as
a reference would be.

Buffers that no step changes are constants of the programs. The module shows copies of them, which
are not to be written to; a change of the user's own is captured again (`variants.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture import version_of
from autopar.errors import NotSupportedError, StateError
from autopar.module.optimizers import has_trained
from autopar.program import ChangedBuffer
from autopar.runtime.state import all_names, together


class Originals:
    """The parameters of the user's model, as they were copied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = (model,)
        self._versions = WeakIdKeyDictionary({p: version_of(p) for p in model.parameters()})
        self._is_first, self._is_known = True, False

    def seen(self) -> None:
        """Values were given to the parallel module, or taken out of it: check no more."""
        self._is_known = True

    def is_written(self) -> bool:
        """Has a parameter been written to since the module copied it?"""
        own = self._model[0].parameters()
        return any(version_of(p) != self._versions.get(p) for p in own if not p.is_meta)

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
                and version_of(p) != self._versions.get(p)
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


class ConstantBuffers:
    """The buffers of a parallel module that no step changes."""

    def __init__(self, held: Mapping[str, Tensor], changed: Iterable[ChangedBuffer]) -> None:
        live = {name for buffer in changed for name in all_names(buffer)}
        self._seen = [(n, b, version_of(b)) for n, b in held.items() if n not in live]

    def check(self) -> None:
        """Raise `NotSupportedError` for a buffer that was written to."""
        for name, tensor, version in self._seen:
            if version_of(tensor) != version:
                raise NotSupportedError(
                    f"buffer `{name}` of the parallel module was written to; programs have it as a "
                    "constant",
                    hint="write to that of the original model: the next step captures it again",
                )
