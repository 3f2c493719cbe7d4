"""Random models: graphs of a few operators of all families, drawn from a seed.

Each step takes values that are there, recent ones rather, with new or earlier weights. What nothing
reads ends in the loss. `Graph.text` says what was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.helpers.random_models.draw import BATCH, CLASSES, LENGTH, Draw, Step
from tests.helpers.random_models.steps import MAKERS, by_weight, loss


class Graph(nn.Module):
    """A model that runs steps; the loss is made of what no step reads."""

    def __init__(self, steps: Sequence[Step], n_inputs: int, losses: Sequence[Step]) -> None:
        super().__init__()
        self.steps, self.n_inputs, self.losses = tuple(steps), n_inputs, tuple(losses)
        self.parts = nn.ModuleList(step.part or nn.Identity() for step in (*steps, *losses))

    def forward(self, x: Tensor, image: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        values = [x, image, ids, labels]
        for i, step in enumerate(self.steps):
            values.append(self._run(step, i, values))
        ends = [self._run(step, i, values) for i, step in enumerate(self.losses, len(self.steps))]
        return sum(ends[1:], ends[0])

    def _run(self, step: Step, i: int, values: Sequence[Tensor]) -> Tensor:
        found = [values[k] for k in step.inputs]
        return step.run(self.parts[i], *found) if step.part is not None else step.run(*found)

    def text(self) -> str:
        """One line per step."""
        lines = [
            f"{self.n_inputs + i}: {step.name} of {', '.join(map(str, step.inputs))}"
            for i, step in enumerate(self.steps)
        ]
        return "\n".join((*lines, *(f"loss: {step.name} of {step.inputs}" for step in self.losses)))


def random_batch(seed: int) -> dict[str, Tensor]:
    """Rows of numbers, images, ids, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    ids = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    ignored = torch.rand(labels.shape, generator=generator) < 0.3
    return {
        "x": normal(BATCH, LENGTH, 8),
        "image": normal(BATCH, 4, 6, 4),
        "ids": ids,
        "labels": labels.masked_fill(ignored, -100),
    }


N_STEPS = (5, 15)


def random_graph(seed: int) -> Graph:
    """The model of a seed, always the same."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    draw = Draw(rng, list(random_batch(seed).values()))
    n_inputs, wanted = len(draw.values), rng.randint(*N_STEPS)
    while len(draw.steps) < wanted or not draw.values[-1].requires_grad:
        draw.try_step(by_weight if not draw.steps else rng.choice(MAKERS))
    ends = [i for i in draw.unread if draw.values[i].requires_grad]
    return Graph(draw.steps, n_inputs, [loss(draw, i) for i in ends])
