"""Hooks on the user's model: which are traced, and which would never run.

Forward hooks run in the trace, so what they compute is part of the graph. A hook on a gradient
would never run: the gradients are made by the generated program, from shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.module_tracker import ModuleTracker

from autopar.capture.findings import Findings
from autopar.capture.python_state.snapshot import Snapshot
from autopar.errors import NotSupportedError

_FORWARD = {"_forward_pre_hooks": "forward pre hook", "_forward_hooks": "forward hook"}
_BACKWARD = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre hook"}
_OF_PARAMETERS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
_GLOBAL = {
    "_global_forward_pre_hooks": "global forward pre hook",
    "_global_forward_hooks": "global forward hook",
    "_global_backward_hooks": "global backward hook",
    "_global_backward_pre_hooks": "global backward pre hook",
}
_HINT = (
    "gradients are in `.grad` of pm.parameters() after pm.step; remove the hook and change them "
    "there, or put a torch.autograd.Function into forward"
)


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module that the trace runs."""
    for kind in _FORWARD:
        yield from getattr(module, kind).values()


def check_hooks(model: nn.Module, findings: Findings, training: bool) -> None:
    """Note hooks that the trace runs; raise `NotSupportedError` for one that would never run."""
    for kind, what in _GLOBAL.items():
        for hook in getattr(torch_module, kind).values():
            if isinstance(getattr(hook, "__self__", None), ModuleTracker):
                raise NotSupportedError(
                    "a FlopCounterMode, or another tracker of torch that follows modules, is on: "
                    "it sees no modules in a generated program",
                    hint="leave it out around autopar: put it around forward and backward of the "
                    "original model; pm.plan.predicted.mfu is the predicted utilisation",
                )
            raise NotSupportedError(
                f"{what} `{_name(hook)}` for all modules is not traced",
                where=where_defined(hook),
                hint="register forward hooks on the modules themselves; of gradients: " + _HINT,
            )
    for path, module in model.named_modules():
        for kind, what in _FORWARD.items():
            for hook in getattr(module, kind).values():
                note = f"{what} `{_name(hook)}` of {_of(path)}"
                findings.add("kept", note, "traced into the graph", where_defined(hook))
        for kind, what in _BACKWARD.items():
            for hook in getattr(module, kind).values() if training else ():
                raise _never_runs(what, hook, _of(path))
    for name, parameter in model.named_parameters():
        for kind, what in _OF_PARAMETERS.items():
            for hook in (getattr(parameter, kind) or {}).values() if training else ():
                raise _never_runs(what, hook, f"parameter `{name}`")


def _never_runs(what: str, hook: Any, of: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what} `{_name(hook)}` of {of} would never run: gradients are made by the generated "
        "program, not by autograd through this model",
        where=where_defined(hook),
        hint=_HINT,
    )


def hook_records(taken: Snapshot, model: nn.Module) -> None:
    """Record how many hooks there are, and which, to notice one that is added later."""
    for path, module in model.named_modules():
        for kind, what in (*_FORWARD.items(), *_BACKWARD.items()):
            hooks = vars(module)[kind]
            taken.measure(f"{what}s of {_of(path)}", tuple if hooks else len, hooks)
    for name, parameter in model.named_parameters():
        for kind, what in _OF_PARAMETERS.items():
            hooks = getattr(parameter, kind)
            text = f"{what}s of parameter `{name}`"
            if hooks is None:
                taken.attributes.append((parameter, kind, None))
                taken.values[text] = 0
            else:
                taken.measure(text, len, hooks)
    for kind, what in _GLOBAL.items():
        taken.measure(f"{what}s", len, getattr(torch_module, kind))


def _of(path: str) -> str:
    return f"`{path}`" if path else "the model"


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__


def where_defined(function: Any) -> str | None:
    """`file:line` of a function, None if it has no Python code."""
    inner = inspect.unwrap(getattr(function, "func", function))
    inner = getattr(inner, "__func__", inner)
    if not hasattr(inner, "__code__"):  # an object that is called
        inner = vars(type(inner)).get("__call__")
    code = getattr(inner, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
