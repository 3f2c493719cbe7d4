"""What users hold as parameters, beside the shards that programs run on.

A parameter of the module is a `Sharded` tensor (`runtime/tensors`). Its `local` is a plain leaf
that the generated program differentiates. Gradients pass between the two around each step:

    before    local.grad = the shard of parameter.grad           (`shards`, `before_step`)
    after     parameter.grad = local.grad, as a whole tensor     (`after_step`)

Hooks on parameters run after the step, on the gradient of the whole step, as one backward on the
whole batch would call them. They see whole tensors, so what they do is what it is in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from autopar.errors import NotSupportedError, OptionError
from autopar.runtime.state import StageState
from autopar.runtime.tensors import Sharded, Spread, local_of, stored_parameter

# As DTensor does: on GPUs, optimizers then take their kernels over lists of tensors.
if Sharded not in _foreach_supported_types:
    _foreach_supported_types.append(Sharded)


def make_parameters(
    place: StageState, shards: Mapping[str, Tensor], gathered: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stage, by name; `gathered` may be gathered for updates."""
    return {
        p.name: stored_parameter(
            shards[p.name],
            Spread(
                p, place.sizes, tuple(place.coordinate), place.groups, place.pipeline.n_stages,
                p.name in gathered,
            ),
            p.requires_grad,
        )
        for p in place.parameters
    }  # fmt: skip


def shard_of(parameter: nn.Parameter) -> Tensor:
    """The leaf that programs run on, with the gradient that the parameter has."""
    assert isinstance(parameter, Sharded)
    local, gradient = parameter.local, parameter.grad
    if gradient is None:
        local.grad = None
    elif isinstance(gradient, Sharded):
        local.grad = gradient.local
    else:  # a whole tensor that the user has set
        local.grad = parameter.spread.local(gradient)
    return local


def shards(parameters: Mapping[str, nn.Parameter | None]) -> dict[str, Tensor]:
    """Parameter name -> its leaf, with the gradient that the parameter has."""
    return {name: shard_of(p) for name, p in parameters.items() if p is not None}


class StepGradients:
    """The gradients of one step: `before` gives leaves to a program, `after` takes them back."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], accumulates: bool) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p is not None}
        self._accumulates = accumulates
        self._earlier: dict[str, Tensor | None] = {}

    def before(self) -> dict[str, Tensor]:
        """The leaves. Raises `NotSupportedError` for a parameter that was frozen at capture."""
        out = {}
        self._warn_if_not_zeroed()
        for name, parameter in self._parameters.items():
            assert isinstance(parameter, Sharded)
            if parameter.requires_grad and not parameter.spread.parameter.requires_grad:
                raise NotSupportedError(
                    f"`{name}` requires grad now, and did not when the model was captured",
                    hint="set requires_grad before autopar.parallelize",
                )
            out[name] = shard_of(parameter)
            if parameter._backward_hooks:
                self._check_hooks(name, parameter._backward_hooks.values())
                self._earlier[name], parameter.local.grad = parameter.grad, None
        return out

    def _warn_if_not_zeroed(self) -> None:
        """Warn if gradients that an optimizer has used are still there, as of the first of them."""
        used = [p for p in self._parameters.values() if isinstance(p, Sharded) and p.is_used]
        for p in used:
            p.is_used = False
        first = next((p for p in used if p.requires_grad), None)
        if first is not None and first.grad is not None and bool(local_of(first.grad).any()):
            warnings.warn(
                f"the gradient of `{first.spread.name}` that an optimizer has used is still there, "
                "and this step adds to it: optimizer.zero_grad() or pm.zero_grad() clears it, "
                "zero_grad() of the original model does not",
                stacklevel=4,
            )

    def _check_hooks(self, name: str, hooks: Iterable[object]) -> None:
        if any(getattr(hook, "__module__", "") == "torch.autograd.graph" for hook in hooks):
            raise NotSupportedError(
                f"register_multi_grad_hook of `{name}`: hooks of a parallel module run after "
                "backward, where torch's count of gradients does not",
                hint="parameter.register_hook(fn), or read `.grad` after pm.step",
            )
        if self._accumulates:
            raise NotSupportedError(
                f"a hook on the gradient of `{name}`, with microbatches that one process would "
                "run one after the other, calling it for each",
                hint="plan with microbatches=1, or change parameter.grad after pm.step",
            )

    def after(self) -> None:
        """Hand the gradients to the parameters, and run their hooks."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                assert isinstance(parameter, Sharded)
                if not parameter.requires_grad:  # frozen since: one process makes no gradient
                    parameter.local.grad = None
                    continue
                self._hand_over(name, parameter)
        for parameter in self._parameters.values():
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks and parameter.grad is not None:
                for hook in tuple(hooks.values()):
                    hook(parameter)

    def _hand_over(self, name: str, parameter: Sharded) -> None:
        found = parameter.local.grad
        if found is None:
            parameter.grad = self._earlier.get(name, parameter.grad)
            return
        held = parameter.grad
        if isinstance(held, Sharded) and held.local is found:
            return
        gradient: Tensor = Sharded(found, parameter.spread)
        if name not in self._earlier:
            parameter.grad = gradient
            return
        hooks = parameter._backward_hooks
        assert hooks is not None
        for hook in tuple(hooks.values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if not isinstance(gradient, Sharded):
            gradient = Sharded(parameter.spread.local(gradient), parameter.spread)
        earlier = self._earlier[name]
        parameter.grad = gradient if earlier is None else earlier + gradient


def gathered_names(patterns: Collection[str], names: Collection[str]) -> frozenset[str]:
    """The parameters that `optimizer_gather=` names.

    Raises `OptionError` for a pattern that matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            raise OptionError(
                f"optimizer_gather={pattern!r} matches no parameter",
                hint=f"names are like {sorted(names)[:3]}; * stands for any text",
            )
        found |= matches
    return frozenset(found)
