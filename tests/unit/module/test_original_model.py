"""What a user does to the model that was parallelized, or had done to it before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import NotSupportedError

BATCH = {"x": torch.arange(32.0, dtype=torch.float64).view(8, 4) / 32}


class Net(nn.Module):
    """Two linear layers and a batch norm, in float64."""

    def __init__(self, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk or nn.Linear(4, 4)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(x))).square().mean()


def parallel(model: nn.Module) -> autopar.ParallelModule:
    return autopar.parallelize(model, (1, 1), BATCH)


@pytest.mark.parametrize("convert", [nn.Module.float, nn.Module.half, nn.Module.bfloat16])
def test_programs_in_another_dtype_are_refused(convert: Callable[[nn.Module], Any]) -> None:
    """The planned program goes on; one captured later would compute in that dtype."""
    model = Net()
    module = parallel(model)
    before = module.step(**BATCH)
    convert(model)
    torch.testing.assert_close(module.step(**BATCH), before)
    module.eval()
    with pytest.raises(NotSupportedError, match=r"planned as torch\.float64") as caught:
        module.loss(**BATCH)
    assert "deepcopy" in str(caught.value)
    model.double()
    assert module.loss(**BATCH).dtype == torch.float64
