"""A step of the user's own module on one process (`module_step`).

The module is copied; hooks, autograd Functions, checkpointed regions, modes and dtypes stay as they
are. The copy gets the weights of the step, and its random numbers are those of the captured
program (`capture/positional.py`). A hook or a loss may hold the user's own objects: gradients that
reach the user's parameters count as the copy's, and the user's objects are restored.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import (
    LossFn,
    PositionalRandom,
    WithLoss,
    buffer,
    cast_at_door,
    loss_of,
    microbatch,
    with_history,
)
from autopar.errors import AutoparError, VerificationError
from autopar.operators import step_seed
from autopar.parity.alone import StepResult
from autopar.precision import AS_IT_IS, Precision
from autopar.program.graph import Accumulation

_TORCH, _AUTOPAR = (str(Path(path).parent) for path in (torch.__file__, Path(__file__).parent))
Batch = Mapping[str, Any] | Sequence[Any]


_HINT = (
    "check that the model runs without autopar; a model on meta needs buffers that "
    "reset_parameters() fills"
)


@dataclass(frozen=True)
class ModuleStep:
    """One step of the user's module.

    result     loss, gradients, and all buffers
    largest    of the numbers that backward computes, scalars aside
    before     all buffers before the step
    drawn      for each run of the module: what it drew at random, by number
    unpaired   what drew random numbers that the captured program cannot repeat
    """

    result: StepResult
    largest: float
    before: Mapping[str, Tensor]
    drawn: tuple[Mapping[int, Any], ...]
    unpaired: tuple[str, ...]


def module_step(
    model: nn.Module,
    example_inputs: Batch,
    loss_fn: LossFn | None,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    accumulation: Accumulation | None,
    seed: int,
    precision: Precision = AS_IT_IS,
) -> ModuleStep:
    """Run forward and backward of a copy of `model`, on cpu.

    In mixed precision it runs on casts of its parameters (`torch.func.functional_call`).

    parameters, buffers   values by name, parameters as stored; other buffers keep the model's
    seed                  of the step (`Stream.seed`)

    Raises `VerificationError` if the module fails, or if its state cannot be copied.
    """
    with _kept(model, loss_fn) as own:
        try:
            twin, loss_fn = _twin(model, loss_fn, parameters, buffers)
            used = {name: precision.used(parameter.dtype) for name, parameter in own.items()}
            before = {name: value.detach().clone() for name, value in twin.named_buffers()}
            cast_at_door(twin, precision)
            total, draws, largest = _run(
                twin, example_inputs, loss_fn, accumulation, seed, precision, used
            )
        except AutoparError:
            raise
        except Exception as error:
            on, hint = "these inputs", _HINT
            if accumulation is not None and accumulation.n > 1:
                on = f"the rows of one of {accumulation.n} microbatches of these inputs"
                hint = f"microbatches=1, or a forward for any rows; else {_HINT}"
            raise VerificationError(
                f"{type(model).__name__} itself fails on {on} on cpu: "
                f"{type(error).__name__}: {error}",
                where=_line(error),
                hint=hint,
            ) from error
        gradients = {}
        for name, parameter in twin.named_parameters():
            grads = [g for g in (parameter.grad, own[name].grad) if g is not None]
            gradients[name] = sum(grads, torch.zeros_like(parameter)).detach()
        after = {name: value.detach().clone() for name, value in twin.named_buffers()}
    unpaired = dict.fromkeys(name for draw in draws for name in draw.unpaired)
    drawn = tuple(draw.drawn for draw in draws)
    result = StepResult(total, gradients, after)
    return ModuleStep(result, largest, before, drawn, tuple(unpaired))


def _line(error: Exception) -> str | None:
    """The user's line that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _AUTOPAR))]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None


def _run(
    twin: nn.Module,
    example_inputs: Batch,
    loss_fn: LossFn | None,
    accumulation: Accumulation | None,
    seed: int,
    precision: Precision,
    used: Mapping[str, torch.dtype],
) -> tuple[Tensor, list[PositionalRandom], float]:
    """The loss, the random numbers of each run, and the largest number of backward; the gradients
    are in `twin`.

    used   parameter -> the dtype it is used in
    """
    n = accumulation.n if accumulation else 1
    draws, losses, backward = [], [], _Largest()
    for i in range(n):
        rows = microbatch(example_inputs, accumulation, i) if accumulation else example_inputs
        with PositionalRandom(step_seed(seed, i) if accumulation else seed, precision) as draw:
            with precision.autocast():
                loss = _loss(twin, rows, loss_fn, used) / n
            with backward:
                loss.backward()
        draws.append(draw)
        losses.append(loss.detach())
    return torch.stack(losses).sum(), draws, backward.largest


class _Largest(TorchDispatchMode):
    """The largest number that is computed; not scalars, nor views, which may be of weights.

    A scalar that is expanded counts: so the gradient of a mean reaches its tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_new = all(result.alias_info is None for result in func._schema.returns)
        is_new |= func is torch.ops.aten.expand.default
        for value in out if isinstance(out, (tuple, list)) else (out,):
            is_number = is_new and isinstance(value, Tensor) and value.is_floating_point()
            # Autograd's zeros have no memory: torch takes their shapes from meta, or crashes.
            has_memory = is_number and not (value.is_meta or torch._is_zerotensor(value))
            if has_memory and value.numel() > 1:
                self.largest = max(self.largest, value.detach().abs().nan_to_num().max().item())
        return out


def _loss(
    twin: nn.Module, batch: Batch, loss_fn: LossFn | None, used: Mapping[str, torch.dtype]
) -> Tensor:
    tree = dict(batch) if isinstance(batch, Mapping) else tuple(batch)
    tree = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), tree)
    args, kwargs = ((), tree) if isinstance(tree, dict) else (tree, {})
    target, prefix = twin, ""
    if loss_fn is not None:
        target, prefix = WithLoss(twin, loss_fn), "model."
        target.training = twin.training
    casts = {
        prefix + name: parameter.to(used[name])
        for name, parameter in twin.named_parameters()
        if used[name] != parameter.dtype
    }
    outputs = functional_call(target, casts, args, kwargs) if casts else target(*args, **kwargs)
    loss: Tensor | None = outputs[0] if loss_fn is not None else loss_of(outputs)
    if loss is None:
        raise VerificationError(f"{type(twin).__name__} itself returns no scalar loss")
    return loss


def _twin(
    model: nn.Module,
    loss_fn: LossFn | None,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> tuple[nn.Module, LossFn | None]:
    """A copy of the model with these values, and the loss of the copy."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        value = parameters[name].detach().to("cpu").clone()
        twin = nn.Parameter(value, parameter.requires_grad)
        twin.__dict__.update(parameter.__dict__)
        for hook in (parameter._backward_hooks or {}).values() if twin.requires_grad else ():
            twin.register_hook(hook)
        memo[id(parameter)] = twin
    for name, held in model.named_buffers():
        value = buffers[name] if name in buffers else buffer(model, name)()
        memo[id(held)] = value.detach().to("cpu", held.dtype).clone()
    for _, kept in with_history(model):
        memo[id(kept)] = kept.detach().clone()
    # A loss that is a method of the model, or a module, is copied with it.
    travels = isinstance(loss_fn, (nn.Module, MethodType, partial))
    copied, own_loss = copy.deepcopy((model, loss_fn if travels else None), memo)
    for module in copied.modules():
        if isinstance(module, nn.SyncBatchNorm):  # one process sees the whole batch
            module.forward = MethodType(_BatchNorm.forward, module)  # type: ignore[method-assign]
    return copied, own_loss if travels else loss_fn


@contextmanager
def _kept(model: nn.Module, loss_fn: LossFn | None) -> Iterator[dict[str, nn.Parameter]]:
    """Restore gradients and buffers of the user's objects, and the generators' states.

    Inside, gradients start at None. Yields the model's parameters.
    """
    modules = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    parameters = [p for m in modules for p in m.parameters()]
    gradients = [p.grad for p in parameters]
    buffers = [b for m in modules for b in m.buffers() if not b.is_meta]
    values = [b.detach().clone() for b in buffers]
    python, arrays = random.getstate(), np.random.get_state()
    for p in parameters:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            yield dict(model.named_parameters())
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for b, value in zip(buffers, values, strict=True):
                if not same(b, value):
                    b.copy_(value)


def same(value: Tensor, other: Tensor) -> bool:
    """Are all elements equal? NaN equals NaN."""
    return bool(((value == other) | ((value != value) & (other != other))).all())
