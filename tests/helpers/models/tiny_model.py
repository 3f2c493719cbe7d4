"""The model of the golden files: its line numbers are in them, so it stands alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tiny(nn.Module):
    """Two layers and a cross-entropy whose labels may be ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)


def batch(seed: int = 0, n_rows: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, 8, generator=generator)
    labels = torch.randint(0, 4, (n_rows,), generator=generator)
    labels[0] = -100
    return {"x": x, "labels": labels}
