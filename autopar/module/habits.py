"""Habits of training scripts that a parallel module cannot follow, each refused by name.

The program is generated, so its layers are only shown (`layers.py`). What changes layers, dtypes or
devices, or wraps the module for other ranks would do nothing, or something else, in silence. Every
refusal says what to write instead.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import NotSupportedError
from autopar.module.layers import Guarded

# Wrappers that synchronise or shard modules -> their names. They walk over modules first.
_WRAPPERS = {
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed._composable.fsdp": "FSDP",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}


def refuse_wrappers() -> None:
    """Raise `NotSupportedError` if a wrapper walks over modules, one of which is parallel."""
    frame = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__"))
        wrapper = next((name for key, name in _WRAPPERS.items() if home.startswith(key)), None)
        if wrapper is not None and _is_asking(frame):
            return
        if wrapper is not None:
            raise NotSupportedError(
                f"{wrapper} around a parallel module, or around a module that contains one; a "
                "parallel module is sharded, and synchronises gradients itself",
                hint="call pm.step(**batch) on the module itself",
            )
        if home != __name__ and not home.startswith("torch.nn.modules."):
            return
        frame = frame.f_back  # type: ignore[assignment]


def _is_asking(frame: FrameType | None) -> bool:
    """Does `torch.distributed.checkpoint` only ask a wrapper whether a module is one?"""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed.checkpoint"):
            return True
        frame = frame.f_back
    return False


def keep_from_dynamo(kind: type[nn.Module]) -> None:
    """Else `torch.compile(pm)` would compile what captures the model and runs its program.

    Called when a graph was captured: importing dynamo, which takes seconds, is done by then.
    """
    if not getattr(kind.forward, "_torchdynamo_disable", False):
        setattr(kind, "forward", torch.compiler.disable(kind.forward))  # noqa: B010


def refuse_export() -> None:
    """Raise `NotSupportedError` if `torch.export` traces the module."""
    if torch.compiler.is_exporting():
        _refuse_export("torch.export")


def warn_of_seed(seen: int) -> int:
    """Warn if torch was seeded with another seed than the one seen; returns the seed of now."""
    now = torch.initial_seed()
    if now != seen:
        warnings.warn(
            "torch.manual_seed after autopar.parallelize does not change the random numbers of a "
            "parallel module (dropout), which has a stream of its own: "
            "pm.stream.base, pm.stream.n_steps = seed, 0 starts it anew, on every rank",
            stacklevel=4,
        )
    return now


def _refuse_export(what: str) -> NoReturn:
    raise NotSupportedError(
        f"{what} of a parallel module, of which this rank has a part",
        hint="load pm.full_state_dict() into the original model on one process, and export that",
    )


class PlannedModule(Guarded):
    """A module whose layers are a generated program."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotSupportedError(
            "saving a parallel module itself, of which this rank has a part",
            hint="autopar.save(pm, optimizer, path), or on rank 0 "
            "torch.save(pm.full_state_dict(), path); every rank calls full_state_dict()",
        )

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module and its layers. Raises `NotSupportedError` for FSDP and DDP."""
        refuse_wrappers()
        yield from super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The first layers. Raises `NotSupportedError` for FSDP."""
        refuse_wrappers()
        yield from super().named_children()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Called by `load_state_dict` of a module that contains this one."""
        raise NotSupportedError(
            "load_state_dict of a module that contains a parallel module",
            hint="autopar.load(pm, optimizer, path), or pm.load_state_dict(tensors)",
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`, with another way to generate."""
        raise NotSupportedError(
            "generate() on a parallel module",
            hint="whole = pm.unsharded() on every rank, then whole.generate(...) on rank 0",
        )

    def share_memory(self) -> NoReturn:
        """Raise `NotSupportedError`: processes are ranks, which have shards of their own."""
        raise NotSupportedError(
            "share_memory() of a parallel module, of which each process has a part",
            hint="torchrun or autopar.launch starts the processes, and pm.step synchronises them",
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """`torch.jit.script` asks for this first."""
        _refuse_export("torch.jit.script")

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """`DistributedDataParallel` asks for this first, and `torch.jit.trace` for all there is."""
        if sys._getframe(1).f_globals.get("__name__") == "torch._jit_internal":
            _refuse_export("torch.jit.trace")
        raise NotSupportedError(
            "DistributedDataParallel around a parallel module, which synchronises gradients itself",
            hint="call pm.step(**batch) on the module itself",
        )


class _Loss(Tensor):
    """A loss of a parallel module, detached."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # files need no autopar

    def detach_(self) -> Self:
        """The loss itself, which is detached; torch detaches no view in place."""
        return self

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.as_subclass(Tensor).clone().as_subclass(type(self))

    def __repr__(  # type: ignore[override]
        self, *, tensor_contents: object = None
    ) -> str:
        return repr(self.as_subclass(Tensor))


class StepLoss(_Loss):
    """The loss of a step, detached. Its backward has run."""

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupportedError`: `pm.step` runs backward."""
        raise NotSupportedError(
            "loss.backward() after pm.step, which has run backward already",
            hint="leave it out; for a term that was added to the loss, call backward() of the term "
            "alone: penalty.backward() adds its gradients to those of the step. "
            "pm.step(..., weight=1 / n) scales gradients, for one of n batches",
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `NotSupportedError` for `torch.autograd.backward` and `grad` of the loss."""
        if func is torch.autograd.backward or func is torch.autograd.grad:
            raise NotSupportedError(
                f"torch.autograd.{func.__name__} of the loss of pm.step, which has run backward",
                hint="leave it out; gradients are in `.grad` of pm.parameters()",
            )
        return super().__torch_function__(func, types, args, kwargs)


class ForwardLoss(_Loss):
    """The loss of a forward program. What is computed of it may have gradients, it has none."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As of any tensor; raises `NotSupportedError` if there is nothing to differentiate."""
        if not self.requires_grad:
            raise _without_gradients("loss.backward()")
        super().backward(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise `NotSupportedError` for `torch.autograd.backward` and `grad` of the loss."""
        if func is torch.autograd.backward or func is torch.autograd.grad:
            asked = pytree.tree_leaves([*args, *(kwargs or {}).values()][:1])
            if any(isinstance(t, ForwardLoss) and not t.requires_grad for t in asked):
                raise _without_gradients(f"torch.autograd.{func.__name__} of the loss")
        return super().__torch_function__(func, types, args, kwargs)


def _without_gradients(what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what} of pm.loss(**batch) or pm(**batch), which have no gradients",
        hint="pm.step(**batch) runs forward and backward; gradients are in `.grad` of "
        "pm.parameters()",
    )
