"""Dynamic loss scaling of float16 gradients, over all ranks and stages.

    step      the loss is multiplied by the scale; after it, gradients are divided by the scale,
              and each rank notes whether one of its own is not finite     (`before`, `after`)
    decide    once an optimizer step, one all_reduce says whether any rank found one; or clipping
              says so, whose norm is over all ranks anyway     (`overflow`, `decide`)
    skipped   all gradients are dropped, so that the optimizer changes nothing; the scale is halved
    kept      after 2,000 of these in a row, the scale is doubled

Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2; the constants are those of
`torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.runtime.groups import Group, phase
from autopar.runtime.state.aside import Aside

FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


@dataclass
class LossScale:
    """What a checkpoint keeps: the scale, optimizer steps since it changed, and skipped ones."""

    value: float = FIRST
    n_kept: int = 0
    n_skipped: int = 0


@dataclass
class LossScaler:
    """The loss scale of one module on this rank; `everyone` is the group of all ranks, if several.

    `drop` clears all gradients of the module on this rank.
    """

    everyone: Group | None
    device: torch.device
    drop: Callable[[], None]
    scale: LossScale = field(default_factory=LossScale)
    _found: Tensor | None = field(default=None, init=False)
    _aside: Aside = field(default_factory=Aside, init=False)

    def before(self, leaves: Mapping[str, Tensor]) -> float:
        """Put gradients of earlier steps aside: those of this one will be scaled. The scale."""
        self._aside.put(leaves)
        return self.scale.value

    @torch.no_grad()
    def after(self, leaves: Mapping[str, Tensor], loss: Tensor) -> None:
        """Unscale the gradients, note what is not finite, and add them to the earlier ones."""
        if self._found is None:
            self._found = torch.zeros(1, device=self.device)
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        if gradients:
            inverse = torch.full((), 1.0 / self.scale.value, device=self.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, inverse)
        self._aside.give_back(leaves)

    def overflow(self) -> Tensor | None:
        """inf, 0-d, if a gradient of this rank was not finite, else 0; None before a step."""
        if self._found is None:
            return None
        return torch.where(self._found[0] > 0, torch.inf, 0.0)

    def decide(self, norm: Tensor | None = None) -> bool:
        """Before an optimizer step: are the gradients finite? If not, they are dropped.

        norm    their norm over all ranks, if it is known: then nothing is communicated

        Every rank must call it. It decides once: until the next step it returns True.
        """
        if self._found is None:
            return True
        found, self._found = self._found, None
        if norm is not None:
            is_finite = bool(norm.isfinite())
        else:
            if self.everyone is not None:
                with phase("optimizer"):
                    found = self.everyone.all_reduce(found, "max")
            is_finite = not bool(found)
        scale = self.scale
        if not is_finite:
            self.drop()
            scale.value, scale.n_kept = scale.value * BACKOFF, 0
            scale.n_skipped += 1
        else:
            scale.n_kept += 1
            if scale.n_kept == INTERVAL:
                scale.value, scale.n_kept = scale.value * GROWTH, 0
        return is_finite
