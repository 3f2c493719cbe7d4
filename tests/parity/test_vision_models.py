"""Vision models under random legal assignments, as `test_random_assignments.py` does for text.

Models are tiny and have the parts of real ones: group norms and strided convolutions, patches as a
sequence, depthwise convolutions, residual blocks with frozen batch norms, and a U-Net with a skip.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.passes.analysis import Analysis
from autopar.passes.inter import operator_flops
from autopar.passes.intra import (
    Constraints,
    IntraOpProblem,
    PlacementRequest,
    choose,
    intra_op_problem,
    recipe_cost,
)
from autopar.passes.lowering import lower
from autopar.program import CallLine
from tests.helpers.harness import abstract_cost, generated_code, random_strategy, thread_step

__all__ = ["generated_code"]

BATCH, SIZE, CLASSES = 8, 8, 4


class Classifier(nn.Module):
    """Features of an image, a linear head and a cross-entropy."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(image)), label)


class Averaged(nn.Sequential):
    """The mean of the layers' output over all pixels."""

    def forward(self, image: Tensor) -> Tensor:
        for layer in self:
            image = layer(image)
        return F.adaptive_avg_pool2d(image, 1).flatten(1)


def conv_net() -> nn.Module:
    return Averaged(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.GroupNorm(4, 8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2),
        nn.GroupNorm(1, 16),
        nn.ReLU(),
    )


class Patches(nn.Module):
    """A vision transformer: patches by a convolution, a class token, attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, 5, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(image), -1, -1), tokens], 1) + self.place
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(mixed))[:, 0]


class NextBlock(nn.Module):
    """A depthwise convolution, then an MLP on channels as the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(inner)))).permute(0, 3, 1, 2)


class Bottleneck(nn.Module):
    """A residual block whose batch norms are frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 2
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        for layer in self.layers:
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval()
                for name, statistic in layer.named_buffers():
                    if name != "num_batches_tracked":
                        nn.init.uniform_(statistic, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


class UNet(nn.Module):
    """Down by a pool, up by a transposed convolution and by interpolation, with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, width, 3, padding=1, padding_mode="reflect")
        self.deep = nn.Conv2d(width, 2 * width, 3, padding="same")
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join = nn.Conv2d(2 * width, 4, 1)
        self.norm = nn.InstanceNorm2d(width, affine=True)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        skip = F.silu(self.norm(self.enter(image)))
        deep = self.up(self.deep(F.avg_pool2d(skip, 2)))
        coarse = F.interpolate(F.max_pool2d(deep, 2), scale_factor=2, mode="bilinear")
        return (self.join(torch.cat([skip, coarse], 1)) - image).pow(2).mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "group norms": lambda: Classifier(conv_net(), 16),
    "patches": lambda: Classifier(Patches(8), 8),
    "depthwise": lambda: Classifier(Averaged(nn.Conv2d(4, 8, 2, 2), NextBlock(8)), 8),
    "frozen batch norms": lambda: Classifier(Averaged(nn.Conv2d(4, 8, 3, 2, 1), Bottleneck(8)), 8),
    "down and up": lambda: UNet(8),
}


def images(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, 4, SIZE, SIZE)
    return {
        "image": torch.randn(shape, dtype=torch.float64, generator=generator),
        "label": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


@lru_cache
def analysis_of(model: str) -> Analysis:
    return Analysis.of(capture(MODELS[model]().double(), images(0)))


@lru_cache
def problem_of(model: str, sizes: tuple[int, ...], n_microbatches: int) -> IntraOpProblem:
    cost = abstract_cost(sizes)
    return intra_op_problem(analysis_of(model), cost, n_microbatches, Constraints(), "adamw")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sizes", "n_microbatches"), [((2,), 1), ((4,), 2), ((2, 2), 1)])
@pytest.mark.parametrize("model", MODELS)
def test_assignment(model: str, sizes: tuple[int, ...], n_microbatches: int, seed: int) -> None:
    """One assignment agrees with one process and runs the collectives read off its program."""
    analysis, cost = analysis_of(model), abstract_cost(sizes)
    problem = problem_of(model, sizes, n_microbatches)
    rng = random.Random(f"{model} {sizes} {seed}")
    strategy = random_strategy(analysis, problem, n_microbatches, rng)
    step = thread_step(analysis, cost, strategy, images(seed), seed)
    assert step.wrong == {}
    assert Counter(step.calls) == Counter(step.foretold)


RECIPES = {
    "tensor": Constraints(forbid=frozenset({"data"})),
    "zero-3": Constraints(roles=("data",), zero=3),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_plan(model: str, recipe: str) -> None:
    """Where sharding always pays, plans shard every convolution and matmul over 4 ranks."""
    analysis, cost, n_microbatches = analysis_of(model), abstract_cost((4,)), 2
    pricing = recipe_cost(cost)
    chosen = choose(
        analysis, PlacementRequest(pricing, n_microbatches, RECIPES[recipe]), "adamw", None
    )
    lines = lower(analysis, chosen.strategy, cost).body
    flops = sum(line.flops for line in lines if isinstance(line, CallLine))
    assert flops == sum(operator_flops(analysis)) / (4 * n_microbatches)
    assert thread_step(analysis, cost, chosen.strategy, images(0), 0).wrong == {}
