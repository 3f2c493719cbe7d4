"""Several optimizers of one module, each of other parameters, saved and loaded as one.

A checkpoint has options and state by parameter name. So it does not say which optimizer has a
parameter, and a run may share them out differently after a load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer

from autopar.errors import OptionError
from autopar.runtime.tensors import Sharded

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None

_HINT = "autopar.save(pm, optimizer, path) and autopar.load: one optimizer, a list of them, or None"


class Several:
    """What saving and loading ask of an optimizer, of several ones."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self.state = {p: state for one in optimizers for p, state in one.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, in order."""
        return [group for one in self.optimizers for group in one.param_groups]

    def load_state_dict(self, record: Mapping[str, Any]) -> None:
        """Give each optimizer its groups of the record, and the state of their parameters."""
        groups = list(record["param_groups"])
        for one in self.optimizers:
            n = len(one.param_groups)
            own, groups = groups[:n], groups[n:]
            numbers = {k for group in own for k in group["params"]}
            state = {k: v for k, v in record["state"].items() if k in numbers}
            one.load_state_dict({"state": state, "param_groups": own})


OneOptimizer: TypeAlias = Optimizer | Several


def as_one(given: Optimizers) -> OneOptimizer | None:
    """What a user gave as the optimizer.

    Raises `OptionError` for what is none, and for a parameter that two of them have.
    """
    if given is None or isinstance(given, Optimizer):
        return given
    several = given.values() if isinstance(given, Mapping) else given
    if not isinstance(given, (Mapping, list, tuple)):
        raise OptionError(f"the optimizer is a {type(given).__name__}", hint=_HINT)
    for one in several:
        if not isinstance(one, Optimizer):
            raise OptionError(f"one of the optimizers is a {type(one).__name__}", hint=_HINT)
    found = Several(tuple(several))
    parameters = [id(p) for group in found.param_groups for p in group["params"]]
    if len(set(parameters)) < len(parameters):
        raise OptionError(
            "two of the optimizers have the same parameter, of which a checkpoint has one state",
            hint="build them of different parameters, or save one of them only",
        )
    return found


def refuse_as_state(name: str, value: object) -> None:
    """Raise `OptionError` for an optimizer of sharded parameters among `states`."""
    groups = value.param_groups if isinstance(value, Optimizer) else []
    if any(isinstance(p, Sharded) for group in groups for p in group["params"]):
        raise OptionError(
            f"states[{name!r}] is an optimizer of the module, whose state is sharded",
            hint="autopar.save(pm, [optimizer, second], path), and autopar.load in the same way",
        )
