"""A copy of the user's model that can be traced without touching it or copying a weight.

The model is deep-copied with a memo that maps every parameter and buffer to a fake tensor of
the same shape on cpu, so an 8B model on `meta`, or one whose weights fill the memory, costs
nothing. Only the copy is changed: caches off, experts and some norms (`norms.py`) to a traceable
form, recomputation off (it is the planner's choice).
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

# Expert loops choose rows by data; this form is one batched product (transformers' name).
TRACEABLE_EXPERTS = "batched_mm"
OTHER_EXPERTS = ("eager", "grouped_mm")


def fake_mode() -> FakeTensorMode:
    """Fake tensors with static shapes; real tensors held by the model become constants."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fresh fake tensor on cpu; keeps shape, strides and dtype, shares nothing."""
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
    if isinstance(getattr(module, "gradient_checkpointing", None), bool):
        module.gradient_checkpointing = False  # type: ignore[assignment]
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
    # BatchEncoding and its like are mappings that pytree would take for a leaf.
    tree = dict(example_inputs) if isinstance(example_inputs, Mapping) else tuple(example_inputs)
    faked = pytree.tree_map_only(torch.Tensor, lambda t: fake_like(mode, t), tree)
    return ((), faked) if isinstance(faked, dict) else (faked, {})
