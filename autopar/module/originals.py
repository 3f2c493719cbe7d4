"""What is done to the user's model around `autopar.parallelize`, where no program would read it.

Weights loaded into the user's model would train nothing.

The parallel module has copies of the weights. So `model.load_state_dict(...)` between
`autopar.parallelize` and the first step changes a model that does not train. It is found by the
version counters of the model's parameters and sums of their bits. These are not checked after the
first step, when it is usual to load trained weights back; nor if somebody has trained the model, as
a reference would be.

Warnings are enough for what may be meant: the mode of the model is set and that of the parallel
module is not, the model has gradients, or another parallel module has copies of its parameters.

Buffers that no step changes are constants of the programs. The module shows copies of them, which
are not to be written to; a change of the user's own is captured again (`variants.py`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Mapping
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture import version_of
from autopar.errors import NotSupportedError, StateError
from autopar.module.optimizers import has_trained
from autopar.program.lines import ChangedBuffer
from autopar.runtime.state import all_names, together

# Parameter of users' models -> the models and parallel modules that it was copied for, and whether
# it learned then.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


def warn_of_shared(model: nn.Module, module: nn.Module) -> None:
    """Warn if a living parallel module of another model has a copy of one of these parameters."""
    is_known = any(of() is model for p in model.parameters() for of, _, _ in _copies.get(p, ()))
    if not is_known and _shared_with(model) is not None:
        gc.collect()  # parallel modules are cycles: one that nobody holds may still be there
        found = _shared_with(model)
        if found is not None:
            warnings.warn(
                f"`{found[0]}` is also a parameter of the {found[1]} that another parallel module "
                "was made from: each parallel module trains a copy of its own, and does not see "
                "what the other one learns. One module whose forward returns both losses shares "
                "it; or copy the weights after each optimizer step: with torch.no_grad(): "
                "p.copy_(q.full_tensor())",
                stacklevel=5,
            )
    for parameter in model.parameters():
        _copies.setdefault(parameter, []).append((ref(model), ref(module), parameter.requires_grad))


def _shared_with(model: nn.Module) -> tuple[str, str] | None:
    """A learning parameter and the class of another model that a parallel module has it from."""
    for name, parameter in model.named_parameters():
        for of, module, learned in _copies.get(parameter, ()):
            other = of()
            alive = other is not None and module() is not None
            if alive and other is not model and (learned or parameter.requires_grad):
                return name, type(other).__name__
    return None


def _first_gradient(model: nn.Module) -> str | None:
    """The first parameter with a gradient that is not zero."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or gradient.is_meta:
            continue
        if gradient.layout is not torch.strided or bool(gradient.any()):
            return name
    return None


class Originals:
    """The user's model, as it was when its parameters were copied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = (model,)
        self._mode, self._has_told = model.training, False
        self._gradient = _first_gradient(model)
        self._versions = WeakIdKeyDictionary({p: version_of(p) for p in model.parameters()})
        self._is_first, self._is_known = True, False

    def seen(self) -> None:
        """Values were given to the parallel module, or taken out of it: check no more."""
        self._is_known = True

    def is_written(self) -> bool:
        """Has a parameter been written to since the module copied it?"""
        own = self._model[0].parameters()
        return any(version_of(p) != self._versions.get(p) for p in own if not p.is_meta)

    def warn_of_mode(self, training: bool) -> None:
        """Warn, once, if the model's mode was set and is not that of the parallel module."""
        mode = self._model[0].training
        is_set, self._mode = mode is not self._mode, mode
        if is_set and mode is not training and not self._has_told:
            self._has_told = True
            set_to, own = ("train", "eval") if mode else ("eval", "train")
            warnings.warn(
                f"{set_to}() of the original model does not change the parallel module, whose own "
                f"mode is that of pm.{own}(): call pm.{set_to}()",
                stacklevel=4,
            )

    def warn_of_gradients(self) -> None:
        """At an optimizer's first step: warn if the model had gradients, and still has them."""
        name, self._gradient = self._gradient, None
        if name is not None and self._model[0].get_parameter(name).grad is not None:
            warnings.warn(
                f"`{name}` of the original model had a gradient at autopar.parallelize, which the "
                "parallel module does not have: this optimizer step is without it. Use it before, "
                "or clear it: model.zero_grad()",
                stacklevel=6,
            )

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
