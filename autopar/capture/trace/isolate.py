"""Makes a fake copy of the user's model for tracing: no weight is copied, the model is untouched.

The model is deep-copied with a memo that maps every parameter and buffer to a fake tensor of the
same shape on cpu. So the copy needs no memory, even for an 8B model on `meta` or weights that
fill the machine. Only the copy is changed: caches are turned off, experts and some norms
(`norms.py`) get a traceable form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from autopar.capture.python_state import with_history
from autopar.capture.trace.norms import make_norm_traceable
from autopar.errors import AutoparError, CaptureError, NotSupportedError
from autopar.precision import AS_IT_IS, Precision

# Loops over experts choose rows by data. This form is one batched matmul (transformers' name).
TRACEABLE_EXPERTS = "batched_mm"
OTHER_EXPERTS = ("eager", "grouped_mm")


def fake_mode() -> FakeTensorMode:
    """A mode of fake tensors with static shapes; real tensors in the model become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def fake_like(
    mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A new fake tensor on cpu with the same shape and strides; of the same dtype by default."""
    with mode:
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu"
        )


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    training: bool,
    modes: Mapping[str, bool] | None = None,
    precision: Precision = AS_IT_IS,
) -> nn.Module:
    """The traceable copy, with parameters in the dtypes of use; floating inputs are cast likewise.

    `training=False` also puts it in eval mode. `modes`: the training mode of each module, by path;
    None: those of `model`.

    Raises `NotSupportedError` for a legacy weight or spectral norm, `CaptureError` if an attribute
    cannot be copied.
    """
    _check_norm_hooks(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = fake_like(mode, parameter, precision.used(parameter.dtype))
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(mode, buffer)
    for _, tensor in with_history(model):
        memo[id(tensor)] = fake_like(mode, tensor)
    try:
        twin = copy.deepcopy(model, memo)
    except AutoparError:
        raise
    except Exception as error:  # a lock, a file; a class whose own `__getattr__` raises
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for the trace: "
            f"{type(error).__name__}: {error}",
            hint="keep what cannot be copied outside of the model"
            if "__deepcopy__" not in str(error)
            else "let `__getattr__` of that class raise AttributeError for a name that it lacks, "
            "as copy.deepcopy expects",
        ) from error
    for path, module in twin.named_modules():
        _make_traceable(module)
        if modes is not None:
            module.training = modes[path]
    cast_at_door(twin, precision)
    return twin if training else twin.eval()


def cast_at_door(module: nn.Module, precision: Precision) -> None:
    """From now on, floating inputs of the module are cast as `precision` says."""
    if precision.door_dtype is not None:
        cast = partial(_cast_inputs, precision.door_dtype)
        module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Cast floating inputs of the model, as FSDP2 does (`cast_forward_inputs`)."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))


def _check_norm_hooks(model: nn.Module) -> None:
    """Refuse hooks that compute a weight before forward runs."""
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                name = "weight_norm" if isinstance(hook, WeightNorm) else "spectral_norm"
                raise NotSupportedError(
                    f"torch.nn.utils.{name} of `{path}` assigns a tensor in a hook",
                    hint=f"use torch.nn.utils.parametrizations.{name}, which is traced",
                )


def _make_traceable(module: nn.Module) -> None:
    make_norm_traceable(module)
    config = getattr(module, "config", None)
    if config is None:
        return
    if getattr(config, "use_cache", False):
        config.use_cache = False
    if getattr(config, "_experts_implementation", None) in OTHER_EXPERTS:
        config._experts_implementation = TRACEABLE_EXPERTS


def fake_inputs(
    mode: FakeTensorMode, example_inputs: Mapping[str, Any] | Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with one distinct fake tensor per leaf.

    torch.export merges inputs that are the same object (`labels=input_ids`) into one
    placeholder; distinct fakes keep them apart.
    """
    # pytree would treat a mapping such as BatchEncoding as a leaf.
    tree = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    faked = pytree.tree_map_only(torch.Tensor, lambda t: fake_like(mode, t), tree)
    return ((), faked) if isinstance(faked, dict) else (faked, {})
