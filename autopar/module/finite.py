"""Losses and gradients that are not finite: noticed before an optimizer ruins the parameters.

    by default            an optimizer step after a loss that is NaN or inf, with gradients that are
                          not finite either, raises `NonFiniteError`; parameters are as before
    skip_nonfinite=True   the step adds no gradients and changes no buffers, on all ranks
    skip_nonfinite=False  as torch does: the optimizer takes what there is

The loss is the same on all ranks, so they come to the same end. A script that looks at the loss
itself and calls `zero_grad` meets no error. On GPUs nobody waits for a loss: it is looked at in the
optimizer step after its own, when parameters have taken its gradients already.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from autopar.errors import NonFiniteError
from autopar.module.job import own_rank
from autopar.runtime.groups import Group, phase
from autopar.runtime.state import Aside, gathered
from autopar.units import format_ranks

_MOST_SHOWN = 5
_MOST_SEEN = 64  # of a script that takes gradients without an optimizer


class Guard(Protocol):
    """What is done around one step for gradients that are not finite."""

    def before(self, leaves: Mapping[str, Tensor]) -> float:
        """Before a step on these shards; returns what to multiply its gradients by."""
        ...

    def after(self, leaves: Mapping[str, Tensor], loss: Tensor) -> None:
        """After the step; `loss` is the same on all ranks."""
        ...


class Unguarded:
    """Gradients and loss as they are."""

    def before(self, leaves: Mapping[str, Tensor]) -> float:
        return 1.0

    def after(self, leaves: Mapping[str, Tensor], loss: Tensor) -> None:
        return


@dataclass(eq=False)
class _Seen:
    """The loss of a step, on its way to the host.

    arrived   of a GPU, when it is there
    is_used   has an optimizer taken its gradients?
    """

    step: int
    loss: Tensor
    arrived: torch.cuda.Event | None
    is_used: bool = False


@dataclass
class FiniteCheck:
    """What one module knows of its losses. `everyone`: the group of all ranks, if several."""

    everyone: Group | None
    device: torch.device
    n_steps: int = 0
    n_skipped: int = 0
    _seen: list[_Seen] = field(default_factory=list)

    def before(self, leaves: Mapping[str, Tensor]) -> float:
        """Count the step. Losses whose gradients the user has dropped are forgotten."""
        self.n_steps += 1
        if all(leaf.grad is None for leaf in leaves.values()):
            self._seen = [seen for seen in self._seen if seen.is_used]
        return 1.0

    def after(self, leaves: Mapping[str, Tensor], loss: Tensor) -> None:
        """Keep the loss until an optimizer uses the gradients; nothing is read here."""
        arrived = None
        if loss.is_cpu:
            kept = loss.clone()
        else:
            kept = loss.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._seen = [*self._seen, _Seen(self.n_steps, kept, arrived)][-_MOST_SEEN:]

    def before_optimizer(self, leaves: Mapping[str, Tensor]) -> None:
        """Raise `NonFiniteError` on every rank if gradients that come with a bad loss are bad."""
        due = [seen for seen in self._seen if seen.arrived is None or seen.step < self.n_steps]
        self._seen = [seen for seen in self._seen if seen not in due]
        for seen in self._seen:
            seen.is_used = True
        for seen in due:
            if seen.arrived is not None:
                seen.arrived.synchronize()
        bad = next((s for s in due if not bool(s.loss.isfinite())), None)
        if bad is None:
            return
        found = {
            "gradients": [n for n, leaf in leaves.items() if _is_bad(leaf.grad)],
            "parameters": [n for n, leaf in leaves.items() if _is_bad(leaf)],
        }
        every: list[dict[str, list[str]]] = gathered(found)
        lines = [
            f"{what} on {format_ranks([rank])}: {_listed(of_rank[what])}"
            for what in found
            for rank, of_rank in enumerate(every)
            if of_rank[what]
        ]
        if not lines:
            return
        self._seen.clear()
        is_spoiled = any(of_rank["parameters"] for of_rank in every)
        way_out = "no parameter has changed yet: pm.zero_grad() and go on with another batch"
        raise NonFiniteError(
            f"the loss of step {bad.step} is {bad.loss.item()}. Not finite are\n  "
            + "\n  ".join(lines[:_MOST_SHOWN]),
            hint=("load the last checkpoint" if is_spoiled else way_out)
            + "; pm.step(..., skip_nonfinite=True) leaves such steps out, skip_nonfinite=False "
            "trains on, as torch does",
        )


class SkippedIfBad:
    """One step that is taken back on all ranks if its loss or a gradient is not finite."""

    def __init__(self, check: FiniteCheck, buffers: Mapping[str, Tensor]) -> None:
        self._check, self._buffers = check, buffers
        self._kept: dict[str, Tensor] = {}
        self._aside = Aside()

    def before(self, leaves: Mapping[str, Tensor]) -> float:
        """Put earlier gradients aside, and keep the buffers that the step will change."""
        scale = self._check.before(leaves)
        self._kept = {name: buffer.clone() for name, buffer in self._buffers.items()}
        self._aside.put(leaves)
        return scale

    def after(self, leaves: Mapping[str, Tensor], loss: Tensor) -> None:
        """Add the gradients to the earlier ones, or take the step back. Every rank calls it."""
        check = self._check
        is_bad = not bool(loss.isfinite()) or any(_is_bad(leaf.grad) for leaf in leaves.values())
        found = torch.tensor([float(is_bad)], device=check.device)
        if check.everyone is not None:
            with phase("optimizer"):
                found = check.everyone.all_reduce(found, "max")
        is_skipped = bool(found)
        self._aside.give_back(leaves, with_new=not is_skipped)
        if not is_skipped:
            return
        for name, buffer in self._buffers.items():
            buffer.copy_(self._kept[name])
        check.n_skipped += 1
        if own_rank() == 0:
            warnings.warn(
                f"step {check.n_steps} is skipped: the loss is {loss.item()}, or gradients are not "
                f"finite; {check.n_skipped} skipped so far",
                stacklevel=4,
            )


def _is_bad(tensor: Tensor | None) -> bool:
    return tensor is not None and not bool(tensor.isfinite().all())


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_SHOWN])
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")
