"""The user's layers as a parallel module shows them: their names, kinds, modes and parameters.

The program is generated, so layers do not run. But training scripts walk over them: to group
parameters by kind of layer, to freeze blocks, to name parameters for a checkpoint. So the parallel
module has a tree of `Layer`s, one for each module of the user's model:

    pm.blocks[0].norm            `isinstance(_, nn.LayerNorm)`, with a copy of its plain attributes
    pm.blocks[0].norm.weight     the parameter that trains; absent if another stage has it

What would change the training of one process is refused: calling a layer, setting its attributes,
adding to it, hooks on it, pairing parameters of layers by position where other stages have some.
Modes may change, and the next step checks that they are those captured.
"""

from __future__ import annotations

from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar.errors import NotSupportedError

_BEFORE = "change the model before autopar.parallelize"
_OWN = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith(("_hooks", "_kwargs", "_called"))
)


class OtherStageError(NotSupportedError, AttributeError):
    """An attribute that this rank lacks; `hasattr` is then False, as for any that is absent."""


class Guarded(nn.Module):
    """A module whose parameters, buffers and layers are those of a plan, and stay so."""

    def _names(self) -> set[str]:
        return {*self._parameters, *self._buffers, *self._modules}

    def _refuse(self, what: str, hint: str = _BEFORE) -> NoReturn:
        raise NotSupportedError(f"{what}, whose program is generated", hint=hint)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            kind = "parameter" if isinstance(value, nn.Parameter) else "module"
            self._refuse(f"a new {kind} `{name}` in a parallel module")
        if name in self._names():
            hint = "write into it: with torch.no_grad(): tensor.copy_(value)"
            self._refuse(f"another value for `{name}` of a parallel module", hint)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._names():
            self._refuse(f"removing `{name}` from a parallel module")
        object.__delattr__(self, name)

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of any module; raises `OtherStageError` for a parameter that another stage has."""
        self._check_held(target)
        return super().get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """As of any module; raises `OtherStageError` for a buffer that another stage has."""
        self._check_held(target)
        return super().get_buffer(target)

    def _check_held(self, target: str) -> None:
        """Raise the reason why an attribute, by its dotted name, is absent; torch drops it."""
        path, _, name = target.rpartition(".")
        getattr(self.get_submodule(path), name)

    def add_module(self, name: str, module: nn.Module | None) -> NoReturn:
        """Raise `NotSupportedError`: the program would not run it."""
        self._refuse(f"a new module `{name}` in a parallel module")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> NoReturn:
        """Raise `NotSupportedError`: the program would not use it."""
        self._refuse(f"a new parameter `{name}` in a parallel module")

    def register_buffer(
        self, name: str, tensor: Tensor | None, persistent: bool = True
    ) -> NoReturn:
        """Raise `NotSupportedError`: the program would not use it."""
        self._refuse(f"a new buffer `{name}` in a parallel module")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Behind `to`, `cuda`, `half`, `double` and the like: the plan has decided these."""
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            wanted = fn(probe)
            if (wanted.dtype, wanted.device) != (probe.dtype, probe.device):
                raise NotSupportedError(
                    f"changing a parallel module from {probe.dtype} on {probe.device} to "
                    f"{wanted.dtype} on {wanted.device}",
                    hint="convert the model before autopar.parallelize",
                )
        return self


class Layer(Guarded):
    """One module of the user's model, shown. Its class is also the user's."""

    _path: str
    _elsewhere: frozenset[str]
    _walked: list[Layer]  # those of the model whose parameters or buffers are being gone through

    def __init_subclass__(cls) -> None:
        """Not the user's own (`_shown_class`)."""

    @property
    def _is_shown(self) -> bool:
        """False for containers that users make of layers, such as `pm.blocks[:2]`."""
        return "_path" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_elsewhere", ()):
            raise OtherStageError(
                f"`{self._path}.{name}` is not on this rank: another pipeline stage has it",
                hint="pm.full_state_dict() has the values of all stages, on rank 0",
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or not self._is_shown:
            nn.Module.__setattr__(self, name, value)
        elif name in self._names() or isinstance(value, (nn.Module, nn.Parameter)):
            super().__setattr__(name, value)
        else:
            self._refuse(f"`{self._path}.{name} = ...` on a layer of a parallel module")

    def __delattr__(self, name: str) -> None:
        self._refuse(f"`del {self._path}.{name}` on a layer of a parallel module")

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Behind `parameters`, `buffers` and the like.

        Raises `NotSupportedError` where two layers are gone through in step, as a teacher and its
        student are, and this rank lacks tensors of one that it has of the other.
        """
        if not self._is_shown:
            yield from super()._named_members(*args, **kwargs)
            return
        for other in self._walked:
            self._check_pairs(other)
        self._walked.append(self)
        try:
            yield from super()._named_members(*args, **kwargs)
        finally:
            self._walked.remove(self)

    def _check_pairs(self, other: Layer) -> None:
        if self._path.startswith(f"{other._path}.") or other._path.startswith(f"{self._path}."):
            return
        held = [{n: layer._names() for n, layer in each.named_modules()} for each in (self, other)]
        layers = [m for each in (self, other) for m in each.modules() if isinstance(m, Layer)]
        if held[0] != held[1] and any(layer._elsewhere for layer in layers):
            raise NotSupportedError(
                f"tensors of `{other._path}` and `{self._path}` paired by position: a rank has "
                "those of its own pipeline stage only, so pairs would be left out, or be of others",
                hint="forbid=['pipeline'] plans without stages",
            )

    def extra_repr(self) -> str:
        try:
            return super().extra_repr()
        except OtherStageError:
            return "on another pipeline stage"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse(
            f"calling `{self.__dict__.get('_path', type(self).__name__)}`, a layer of a parallel "
            "module",
            "call the parallel module, or load pm.full_state_dict() into the original model",
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("saving a layer of a parallel module", "save pm.full_state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse(
            "copying a layer of a parallel module", "copy the parallel module, or the model"
        )

    def add_module(self, name: str, module: nn.Module | None) -> None:  # type: ignore[override]
        """Raise `NotSupportedError`; but `pm.blocks[:2]` is made by it, too."""
        if self._is_shown:
            super().add_module(name, module)
        nn.Module.add_module(self, name, module)

    def _no_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(
            f"a hook on `{self._path}`, a layer of a parallel module",
            "hooks on parameters work; register others on the model before autopar.parallelize",
        )

    register_forward_hook = _no_hook
    register_forward_pre_hook = _no_hook
    register_full_backward_hook = _no_hook
    register_full_backward_pre_hook = _no_hook


@cache
def _shown_class(kind: type[nn.Module]) -> type[Layer]:
    """A class that is both `Layer` and the user's, under the user's name.

    It is no subclass that the user wrote, so neither their metaclass nor their `__init_subclass__`
    hears of it: they may ask for arguments, or keep a table of what was made.
    """
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    meta: Any = type(kind)
    plain = ABCMeta if issubclass(meta, ABCMeta) else type
    made: type[Layer] = plain.__new__(meta, kind.__name__, (Layer, kind), own)
    return made


class Shown:
    """The layers of `model`, with the parameters and buffers that this rank has, by full name."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._made: dict[int, Layer] = {}
        self._walked: list[Layer] = []
        self.children = self._children(model, "")
        self.root_parameters = self._held(model._parameters, "", parameters)
        self.root_buffers = self._held(model._buffers, "", buffers)

    def _children(self, module: nn.Module, prefix: str) -> dict[str, Any]:
        return {
            name: None if child is None else self._layer(child, prefix + name)
            for name, child in module._modules.items()
        }

    @staticmethod
    def _held(own: Mapping[str, Any], prefix: str, held: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `own` that this rank holds; None stays None (a linear layer without bias)."""
        return {
            name: None if value is None else held[prefix + name]
            for name, value in own.items()
            if value is None or prefix + name in held
        }

    def _layer(self, module: nn.Module, path: str) -> Layer:
        if id(module) in self._made:
            return self._made[id(module)]
        user_kind: Any = type(module)
        kind = _shown_class(user_kind)
        layer: Layer = object.__new__(kind)
        self._made[id(module)] = layer
        prefix = f"{path}."
        state = {n: v for n, v in module.__dict__.items() if n not in _OWN and n != "forward"}
        state |= {name: OrderedDict() for name in _HOOKS if isinstance(state.get(name), dict)}
        state["_parameters"] = self._held(module._parameters, prefix, self._parameters)
        state["_buffers"] = self._held(module._buffers, prefix, self._buffers)
        state["_modules"] = self._children(module, prefix)
        absent = {*module._parameters, *module._buffers} - {
            *state["_parameters"],
            *state["_buffers"],
        }
        state |= {"_path": path, "_elsewhere": frozenset(absent), "_walked": self._walked}
        layer.__dict__.update(state)
        return layer


class Modes:
    """The training modes that a program was captured in: those of the user's model then."""

    def __init__(self, model: nn.Module) -> None:
        self._of_training = {name: m.training for name, m in model.named_modules() if name}

    def check(self, layers: Mapping[str, nn.Module], training: bool) -> None:
        """Raise `NotSupportedError` for a layer in another mode than it was captured in."""
        for name, layer in layers.items():
            wanted = self._of_training.get(name, training) if training else False
            if layer.training is not wanted:
                now, then = ("training", "evaluation") if not wanted else ("evaluation", "training")
                raise NotSupportedError(
                    f"`{name}` is in {now} mode, and was captured in {then} mode",
                    hint=f"set it on the model before autopar.parallelize, or set it back: "
                    f"pm.get_submodule({name!r}).train({wanted})",
                )


class Holders:
    """Which tensor each name of a module and its layers holds: those of its programs."""

    def __init__(self, root: nn.Module) -> None:
        self._seen = [
            (held, name, tensor, f"{path}.{name}".removeprefix("."))
            for path, module in root.named_modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
        ]

    def check(self) -> None:
        """Raise `NotSupportedError` for another tensor in the place of one of them."""
        for held, name, tensor, full in self._seen:
            if held.get(name) is not tensor:
                raise NotSupportedError(
                    f"another tensor stands in the place of `{full}` of a parallel module, whose "
                    "programs would not read it (torch.func.functional_call puts tensors there)",
                    hint="use the original model for that; or write into the parameter: with "
                    "torch.no_grad(): parameter.copy_(value)",
                )
