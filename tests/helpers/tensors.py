"""Random tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tensor(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
