"""The planner chooses batch norm over a sharded batch; statistics are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import Device, Link, Mesh

FUNCTIONS = {
    True: "synchronised_batch_norm_with_statistics",
    False: "synchronised_batch_norm",
}


class Images(nn.Module):
    """Convolutions and batch norms, then a mean over positions and a cross-entropy."""

    def __init__(self, channels: int, keeps_statistics: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (3, channels):
            layers += [
                nn.Conv2d(before, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels, track_running_stats=keeps_statistics),
                nn.ReLU(),
            ]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(channels, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(pixels).mean((2, 3))), labels)


def batch(n_rows: int, side: int, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(n_rows, 3, side, side, generator=generator)
    labels = torch.randint(0, 5, (n_rows,), generator=generator)
    return {"pixels": pixels.to(device), "labels": labels.to(device)}


def calls(plan: autopar.Plan | None, function: str) -> list[str]:
    assert plan is not None
    (code,) = plan.code().values()
    return [line for line in code.splitlines() if f" = {function}.forward(" in line]


@pytest.mark.parametrize("keeps_statistics", [True, False])
def test_chosen_where_only_rows_divide(keeps_statistics: bool) -> None:
    """6 channels do not divide over 4 ranks; 8 rows do."""
    torch.manual_seed(0)
    slow = Mesh((1, 4), links=[Link(1.0, 0.01)] * 2, device=Device(1.0, 1e30, 1e15))
    report = autopar.verify(
        Images(6, keeps_statistics), slow, batch(8, 4), precision="fp64", mesh_shape="as-given"
    )
    assert len(calls(report.plan, FUNCTIONS[keeps_statistics])) == 2
    report.raise_if_wrong()
    assert report.worst <= 1e-10
