"""Optimizers that would not train what they should, found at their first step.

    parameters of the user's model    autopar trains copies of them. An optimizer of these sees no
                                      gradient and changes nothing; clipping finds the norm 0
    update of whole tensors           Muon, Shampoo, ... beside sharded parameters: refused before
                                      anything changes, unless `optimizer_gather=` names them
    state of whole tensors            loaded from one process's checkpoint: cut to shards
    no parameter                      of a pipeline stage: torch refuses an empty list, so the rank
                                      is told what to write instead

Any other optimizer that needs whole tensors is refused by its first such operator
(`runtime/tensors`). torch calls `_prepare_step` before each step of every optimizer of the process.

torch's own elementwise optimizers need no check of each operator. They step on plain shards: a
`_shadow` of the optimizer has these as parameters and state; `_finish_step` takes new state back.
Hooks of the user's own read and write the optimizer itself, so one that has some has no shadow.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet, ref

from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import NotSupportedError, OptionError, StateError
from autopar.module.parameters import shard_of
from autopar.runtime.tensors import Sharded, local_of

Module = TypeVar("Module", bound=nn.Module)
# Class name -> why its update is not elementwise.
_NEEDS_WHOLE = {
    "Muon": "it orthogonalises matrices",
    "Shampoo": "it preconditions by rows and columns",
    "DistributedShampoo": "it preconditions by rows and columns",
    "SOAP": "it preconditions by rows and columns",
    "Adafactor": "it keeps means over rows and columns",
    "CAME": "it keeps means over rows and columns",
    "LBFGS": "it takes products of all parameters",
}
# Exactly these classes; a subclass may do anything.
_ELEMENTWISE = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
        optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
    }
)  # fmt: skip
# Parameters of users' models that a parallel module trains copies of -> a name of each.
_copied: WeakIdKeyDictionary = WeakIdKeyDictionary()
_trained: WeakIdKeyDictionary = WeakIdKeyDictionary()  # those of them that an optimizer changes
# Parameters of parallel modules -> what their module does before an optimizer steps.
_listeners: WeakIdKeyDictionary = WeakIdKeyDictionary()
_checked: WeakSet[Optimizer] = WeakSet()
_loading: WeakSet[Optimizer] = WeakSet()  # those that call `_finish_load`
_is_watching = False


def warn_of_none(parameters: Iterable[nn.Parameter], stages: Sequence[int], n_stages: int) -> None:
    """Warn if a rank of a pipeline trains nothing, which optimizers of torch refuse."""
    if n_stages > 1 and not any(parameter.requires_grad for parameter in parameters):
        several = f"a rank of stages {', '.join(map(str, stages))}"
        where = several if len(stages) > 1 else f"pipeline stage {stages[0]}"
        warnings.warn(
            f"{where} trains no parameter, and torch's optimizers refuse an empty "
            'list: give them a group, AdamW([{"params": pm.parameters()}]), on every rank alike',
            stacklevel=7,
        )


def watch_optimizers(model: nn.Module) -> None:
    """Check optimizers from now on; the parameters of `model` are no longer those that train."""
    global _is_watching
    for name, parameter in model.named_parameters():
        _copied[parameter] = name
    if not _is_watching:
        register_optimizer_step_pre_hook(_prepare_step)
        register_optimizer_step_post_hook(_finish_step)
        clip_grad._clip_grads_with_norm_ = _checked_clipping(clip_grad._clip_grads_with_norm_)
        _is_watching = True


def call_before_steps(
    parameters: Iterable[Tensor], module: Module, method: Callable[[Module, Optimizer], None]
) -> None:
    """Call a method of a module before each step of an optimizer of these parameters, once a step.

    Nothing is called for a module that is gone.
    """
    # Not a WeakMethod: one that dies with its module fails in its callback (CPython 3.11).
    listener = ref(module), method
    for parameter in parameters:
        _listeners[parameter] = listener


def has_trained(parameter: Tensor) -> bool:
    """Has an optimizer changed this parameter of a user's model since a module copied it?"""
    return parameter in _trained


def _prepare_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Check the optimizer, until it has stepped; returns new arguments of the step, if any."""
    if optimizer not in _checked:
        _check(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for owner, method in {of for p in parameters if (of := _listeners.get(p)) is not None}:
        if (module := owner()) is not None:
            method(module, optimizer)
    if type(optimizer) in _ELEMENTWISE and args[0] is optimizer and not _has_hooks(optimizer):
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        groups = optimizer.param_groups
        if not has_closure and all(isinstance(p, Sharded) for g in groups for p in g["params"]):
            return (_shadow(optimizer), *args[1:]), kwargs
    return None


def _check(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(p, Sharded) for p in parameters) and optimizer not in _loading:
        optimizer.register_load_state_dict_post_hook(_finish_load)
        _loading.add(optimizer)
        _cut_state(optimizer)
    _refuse_copied(optimizer, parameters)
    for p in parameters:
        if p in _copied:
            _trained[p] = True
    _refuse_whole(optimizer, parameters)
    if any(p.grad is not None for p in parameters):
        _checked.add(optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Are there step hooks besides `_prepare_step` and `_finish_step`?"""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)
    return bool(own) or everywhere > 2


def _shadow(optimizer: Optimizer) -> Optimizer:
    """The optimizer with plain shards as parameters and state."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.state = defaultdict(dict)
    shadow.param_groups = []
    for group in optimizer.param_groups:
        shards = [shard_of(p) for p in group["params"]]
        shadow.param_groups.append({**group, "params": shards})
        for p, shard in zip(group["params"], shards, strict=True):
            if p in optimizer.state:
                shadow.state[shard] = {k: local_of(v) for k, v in optimizer.state[p].items()}
    return shadow


def _finish_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Note that gradients were used; take new state from the shadow, if one has stepped."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, Sharded):
                p.is_used = True
    if args[0] is not optimizer:
        _take_back(optimizer, args[0])


def _take_back(optimizer: Optimizer, shadow: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            made = shadow.state.get(p.local)
            if made is None:
                continue
            state = optimizer.state[p]
            for key, value in made.items():
                if key not in state or local_of(state[key]) is not value:
                    is_shard = isinstance(value, Tensor) and value.shape == p.local.shape
                    is_shard = is_shard and key != "step"
                    state[key] = Sharded(value, p.spread) if is_shard else value


def _refuse_copied(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise `OptionError` if all that could train are parameters that autopar has copied."""
    name = _only_copied(parameters)
    if name is not None:
        raise OptionError(
            f"{type(optimizer).__name__} holds `{name}` and other parameters of the model that was "
            "given to autopar.parallelize; they get no gradients",
            hint="build the optimizer from pm.parameters(), after autopar.parallelize",
        )


def _only_copied(parameters: Iterable[Tensor]) -> str | None:
    """The name of the first, if autopar trains copies of all of these, and none has a gradient."""
    held = list(parameters)
    names = [_copied.get(p) for p in held]
    if names and None not in names and all(p.grad is None for p in held):
        return names[0]
    return None


def _checked_clipping(clip: Callable[..., Any]) -> Callable[..., Any]:
    """torch's clipping; it raises `OptionError` for parameters that autopar has copied."""

    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        name = _only_copied(held)
        if name is not None:
            raise OptionError(
                f"clip_grad_norm_ of `{name}` and other parameters of the model that was given to "
                "autopar.parallelize; they get no gradients",
                hint="pm.clip_grad_norm_(c), or torch's function with pm.parameters()",
            )
        return clip(held, *args, **kwargs)

    return checked


def _refuse_whole(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    reasons = (_NEEDS_WHOLE.get(base.__name__) for base in type(optimizer).__mro__)
    reason = next((text for text in reasons if text is not None), None)
    if reason is None:
        return
    for p in parameters:
        if isinstance(p, Sharded) and not (p.spread.is_whole or p.spread.may_gather):
            raise NotSupportedError(
                f"{type(optimizer).__name__} needs the whole of `{p.spread.name}`, because "
                f"{reason}; this rank has a shard ({p.spread})",
                hint="optimizer_gather=[...] names the parameters to gather for their update: "
                'optimizer_gather=["*"] gathers all',
            )


def _finish_load(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        lacks = sorted(optimizer.defaults.keys() - group.keys())
        if lacks:
            raise StateError(
                f"the optimizer state loaded has no {', '.join(map(repr, lacks))} for a group of "
                f"{len(group['params'])} parameters of this pipeline stage",
                hint="with pipeline stages, save and load with "
                "StateDictOptions(flatten_optimizer_state_dict=True), or with autopar.save",
            )
    _cut_state(optimizer)


def _cut_state(optimizer: Optimizer) -> None:
    """Cut state that is whole tensors to shards: that of an optimizer on one process."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Sharded):
            continue
        spread = parameter.spread
        for key, value in state.items():
            is_plain = isinstance(value, Tensor) and not isinstance(value, Sharded)
            if is_plain and value.dim() and tuple(value.shape) == spread.shape:
                state[key] = Sharded(spread.local(value), spread)
