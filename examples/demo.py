"""Two layers with a plan that is easy to read. Pages of `docs` show what this prints here:

autopar plan demo:mlp --mesh 1x4 --hardware a100-80gb
"""

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return loss


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    with torch.device("meta"):
        return Mlp(), {"x": torch.empty(8, 64, 1024)}
