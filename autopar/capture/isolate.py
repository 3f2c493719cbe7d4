"""Makes a fake copy of the user's model for tracing: no weight is copied, the model is untouched.

The model is deep-copied with a memo that maps every parameter and buffer to a fake tensor of the
same shape on cpu. So the copy needs no memory, even for an 8B model on `meta` or weights that
fill the machine. Only the copy is changed: caches are turned off, experts and some norms
(`norms.py`) get a traceable form.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from autopar.capture.norms import make_norm_traceable

# Loops over experts choose rows by data. This form is one batched matmul (transformers' name).
TRACEABLE_EXPERTS = "batched_mm"
OTHER_EXPERTS = ("eager", "grouped_mm")


def fake_mode() -> FakeTensorMode:
    """A mode of fake tensors with static shapes; real tensors in the model become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A new fake tensor on cpu with the same shape, strides and dtype."""
    with mode:
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu"
        )


def fake_copy(model: nn.Module, mode: FakeTensorMode, training: bool) -> nn.Module:
    """The traceable copy; `training=False` also puts it in eval mode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = fake_like(mode, parameter)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(mode, buffer)
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        _make_traceable(module)
    return twin if training else twin.eval()


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
