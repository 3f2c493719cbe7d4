"""What random models are drawn from: values so far, weights, steps that may follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Inputs by position, and their sizes.
X, IMAGE, IDS, LABELS = range(4)
BATCH, LENGTH, CLASSES = 8, 4, 8
WIDTHS = (4, 8, 6, 3)
MOST_ELEMENTS = 2048
Run = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """`run(*values)`, or `run(part, *values)` where the step has weights."""

    name: str
    inputs: tuple[int, ...]
    run: Run
    part: nn.Module | None = None


class Weight(nn.Module):
    """One parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.3)


@dataclass
class Draw:
    """A graph so far: its values on one batch, and what is drawn from."""

    rng: random.Random
    values: list[Tensor]
    steps: list[Step] = field(default_factory=list)

    @property
    def unread(self) -> list[int]:
        """Values that no step reads."""
        read = {i for step in self.steps for i in step.inputs}
        return [i for i in range(len(self.values)) if i not in read]

    def value(self, fits: Callable[[Tensor], bool] = lambda v: v.dim() > 0) -> int | None:
        """Any real value that fits, one that nothing reads rather."""
        found = [i for i, v in enumerate(self.values) if v.is_floating_point() and fits(v)]
        unread = [i for i in found if i in self.unread]
        if unread and self.rng.random() < 0.75:
            return self.rng.choice(unread)
        return self.rng.choice(found) if found else None

    def width(self) -> int:
        return self.rng.choice(WIDTHS)

    def dim(self, value: Tensor) -> int:
        """Seldom the first, which mostly is the batch."""
        if value.dim() > 1 and self.rng.random() < 0.85:
            return self.rng.randrange(1, value.dim())
        return self.rng.randrange(value.dim())

    def weight(self, *shape: int) -> Weight:
        """New, or tied to one of the same shape."""
        alike = [
            s.part for s in self.steps if isinstance(s.part, Weight) and s.part.w.shape == shape
        ]
        part = Weight(*shape)
        if alike and self.rng.random() < 0.6:
            part.w = self.rng.choice(alike).w
        return part

    def try_step(self, maker: Maker) -> bool:
        """Add what `maker` draws, if it fits and its value is neither empty nor large."""
        step = maker(self)
        if step is None:
            return False
        found = [self.values[i] for i in step.inputs]
        out = step.run(step.part, *found) if step.part is not None else step.run(*found)
        if not 0 < out.numel() <= MOST_ELEMENTS or out.dim() > 5:
            return False
        self.steps.append(step)
        self.values.append(out)
        return True


Maker = Callable[[Draw], Step | None]
