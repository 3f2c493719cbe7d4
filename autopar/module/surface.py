"""What a parallel module shows of the user's module besides parameters: plain attributes, no hooks.

Attributes that hold plain data (`config`, `beta`) are those of the user's model: reading and
setting them here reads and sets them there, where each step compares them with its graph. Methods
and parts of the model are not shown, since calling them would run the unsharded model; a method is
refused even to `hasattr`. Hooks are refused: no step calls them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, MethodType
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from autopar.errors import NotSupportedError
from autopar.module.job import own_rank
from autopar.program.graph import Program

_N_TOLD = 3  # lines on stderr
_OWN = frozenset({"stream", "training"})
_OF_WRAPPERS = {
    "module": "it is the module itself: pm.state_dict(), pm.parameters()",
    "no_sync": "leave it out: pm.step adds to the gradients; weight=1 / n for one of n batches",
}
_OF_MODELS = {
    "save_pretrained": "autopar.export_weights(pm, folder) on every rank, which writes config.json "
    "too; or whole = pm.unsharded() on every rank, and whole.save_pretrained(folder) on rank 0",
}
_WAYS_OUT = {
    "forward": "pm.step(..., outputs=fn) hands fn the model's outputs; hooks on the user's model "
    "before autopar.parallelize are traced",
    "backward": "gradients are in `.grad` of pm.parameters() after pm.step",
    "state_dict": "change the dictionary that pm.state_dict() or pm.full_state_dict() returns, or "
    "that pm.load_state_dict is given",
}


class AbsentError(NotSupportedError, AttributeError):
    """An attribute that a parallel module lacks; `hasattr` is then False."""


def _refused_hook(kind: str) -> Callable[..., NoReturn]:
    def register(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`, with another way."""
        raise NotSupportedError(
            f"a {kind.replace('_', ' ')} hook on a parallel module would not run in pm.step",
            hint=next(text for key, text in _WAYS_OUT.items() if key in kind),
        )

    return register


class Surface(nn.Module):
    """Base of `ParallelModule`; `_model` is a tuple of the user's module."""

    _model: tuple[nn.Module]

    def __getattr__(self, name: str) -> Any:
        """A parameter or buffer of this rank, or plain data of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self._shown_model(name)
            if model is None or not hasattr(model, name):
                if name not in _OF_WRAPPERS:
                    raise
                raise AbsentError(
                    f"a parallel module has no `{name}`, as DistributedDataParallel has",
                    hint=_OF_WRAPPERS[name],
                ) from None
        value = getattr(model, name)
        if _is_shown(model, name):
            return value
        # Without a method, `if hasattr(model, "no_weight_decay")` would train something else.
        kind = NotSupportedError if isinstance(value, MethodType) else AbsentError
        raise kind(
            f"a parallel module has no `{name}`: it is a part or method of the user's "
            f"{type(model).__name__}, which is not sharded",
            hint=_OF_MODELS.get(name)
            or f"{type(model).__name__}.{name}(pm) calls a method that needs only parameters; "
            "call others on the original model, or on pm.unsharded(), the model with the values of "
            "now; or use pm.step, pm(**batch), pm.named_parameters() and pm.full_state_dict()",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set plain data of the user's model there; all else here."""
        model = self._shown_model(name)
        if model is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif _is_shown(model, name) or ("", name) in self._frozen_reads():
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """Set this module's own mode. Modes of parts are those of the model at capture."""
        modes = self._captured_modes()
        if mode and not self.training and modes and not modes[""]:
            warnings.warn(
                "the model was captured in evaluation mode: its dropout is off and its statistics "
                "are fixed in pm.step; call model.train() before autopar.parallelize to avoid it",
                stacklevel=2,
            )
        super().train(mode)
        return self

    def _captured_modes(self) -> Mapping[str, bool]:
        """The mode of each part of the model at capture."""
        return {}

    def _frozen_reads(self) -> tuple[tuple[str, str], ...]:
        """(module path, attribute) that the planned step read."""
        return ()

    def _shown_model(self, name: str) -> nn.Module | None:
        held = self.__dict__.get("_model")  # absent in a copy that is being made
        return None if held is None or name.startswith("_") or name in _OWN else held[0]

    register_forward_pre_hook = _refused_hook("forward_pre")
    register_forward_hook = _refused_hook("forward")
    register_full_backward_pre_hook = _refused_hook("full_backward_pre")
    register_full_backward_hook = _refused_hook("full_backward")
    register_backward_hook = _refused_hook("backward")
    register_state_dict_pre_hook = _refused_hook("state_dict_pre")
    register_state_dict_post_hook = _refused_hook("state_dict_post")
    register_load_state_dict_pre_hook = _refused_hook("load_state_dict_pre")
    register_load_state_dict_post_hook = _refused_hook("load_state_dict_post")


def tell_capture(program: Program) -> None:
    """Say on stderr, once, what capture made of the user's code; nothing if that is nothing."""
    lines = program.audit.text().splitlines()[:_N_TOLD] if own_rank() == 0 else []
    for line in lines:
        print(f"autopar captured {program.model_name}: {line}", file=sys.stderr)  # noqa: T201


def _is_shown(model: nn.Module, name: str) -> bool:
    """Is this attribute of the model plain data: no part, parameter, method or property?"""
    if name in vars(model):
        value = vars(model)[name]
        return not (isinstance(value, (nn.Module, Tensor)) or _is_code(value))
    for kind in type(model).__mro__:
        if name in vars(kind):
            value = vars(kind)[name]
            return kind is not nn.Module and not hasattr(type(value), "__get__")
    return False


def _is_code(value: Any) -> bool:
    return hasattr(type(value), "__get__") or isinstance(value, (type, BuiltinFunctionType))
