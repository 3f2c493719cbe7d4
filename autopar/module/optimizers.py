"""Optimizers that would not train what they should, found at their first step.

    parameters of the user's model    autopar trains copies of them, so that optimizer sees no
                                      gradient, and changes nothing
    update of whole tensors           Muon, Shampoo, ... beside sharded parameters: refused before
                                      anything changes, unless `optimizer_gather=` names them
    state of whole tensors            loaded from one process's checkpoint: cut to shards

Any other optimizer that needs whole tensors is refused by its first such operator
(`runtime/tensors`). torch calls `_before_step` before each step of every optimizer of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import NotSupportedError, OptionError
from autopar.runtime.state import StateError
from autopar.runtime.tensors import Sharded

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
# Parameters of users' models that a parallel module trains copies of -> a name of each.
_copied: WeakIdKeyDictionary = WeakIdKeyDictionary()
_trained: WeakIdKeyDictionary = WeakIdKeyDictionary()  # those of them that an optimizer changes
_checked: WeakSet[Optimizer] = WeakSet()
_loading: WeakSet[Optimizer] = WeakSet()  # those that call `_after_load`
_is_watching = False


def watch_optimizers(model: nn.Module) -> None:
    """Check optimizers from now on; the parameters of `model` are no longer those that train."""
    global _is_watching
    for name, parameter in model.named_parameters():
        _copied[parameter] = name
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        _is_watching = True


def has_trained(parameter: Tensor) -> bool:
    """Has an optimizer changed this parameter of a user's model since a module copied it?"""
    return parameter in _trained


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(p, Sharded) for p in parameters) and optimizer not in _loading:
        optimizer.register_load_state_dict_post_hook(_after_load)
        _loading.add(optimizer)
        _cut_state(optimizer)
    _refuse_copied(optimizer, parameters)
    for p in parameters:
        if p in _copied:
            _trained[p] = True
    _refuse_whole(optimizer, parameters)
    if any(p.grad is not None for p in parameters):
        _checked.add(optimizer)


def _refuse_copied(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise `OptionError` if all that could train are parameters that autopar has copied."""
    names = [_copied.get(p) for p in parameters]
    if names and None not in names and all(p.grad is None for p in parameters):
        raise OptionError(
            f"{type(optimizer).__name__} holds `{names[0]}` and {len(names) - 1} more parameters "
            "of the model that was given to autopar.parallelize; they get no gradients",
            hint="build the optimizer from pm.parameters(), after autopar.parallelize",
        )


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


def _after_load(optimizer: Optimizer) -> None:
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
