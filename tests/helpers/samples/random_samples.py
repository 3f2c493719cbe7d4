"""Calls of the operators that draw random numbers, for the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.operators.random import seed_tensor
from tests.helpers.samples.rule_samples import Sample, call, fixed, x


def positions(*shape: int) -> list[Tensor]:
    return [torch.arange(n) for n in shape]


SEED = seed_tensor(3)

RANDOM_SAMPLES: dict[str, list[Sample]] = {
    "autopar.dropout.default": [
        call(x(4, 8), SEED, positions(4, 8), 0.4, 0),
        call(x(4, 1, 8), SEED, positions(4, 1, 8), 0.4, 1),
        call(x(4, 8, 4), SEED, positions(4, 8, 1), 0.4, 2),  # whole channels
        call(fixed(4, 8), SEED, positions(4, 8), 0.4, 3),
        call(x(), SEED, [], 0.4, 4),
    ],
    "autopar.uniform.default": [
        call(SEED, positions(4, 8), 0, torch.float64),
        call(SEED, positions(8, 1), 1, torch.float32),
    ],
}
