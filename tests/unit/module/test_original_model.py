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


def parallel(model: nn.Module) -> Any:
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


def test_the_mode_of_the_original_is_not_followed_and_a_warning_says_so_once() -> None:
    model = Net()
    module = parallel(model)
    before = module.step(**BATCH)
    model.eval()
    with pytest.warns(UserWarning, match=r"call pm\.eval\(\)"):
        assert module.step(**BATCH) == before
    model.train()
    module.eval().loss(**BATCH)
    model.eval()
    model.train()
    module.loss(**BATCH)


def test_parameters_that_two_parallel_modules_copy() -> None:
    first = Net()
    one = parallel(first)
    parallel(first)  # the same model again
    second = Net(first.trunk)
    with pytest.warns(UserWarning, match=r"`trunk\.weight` is also a parameter of the Net"):
        other = parallel(second)
    one.step(**BATCH)
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert not torch.equal(one.trunk.weight.full_tensor(), other.trunk.weight.full_tensor())
    with torch.no_grad():  # as the warning says
        other.trunk.weight.copy_(one.trunk.weight.full_tensor())
    assert torch.equal(one.trunk.weight.full_tensor(), other.trunk.weight.full_tensor())


def test_parameters_of_a_parallel_module_that_is_gone() -> None:
    first = Net()
    module = parallel(first)
    del module
    parallel(Net(first.trunk))


def test_frozen_parameters_may_be_shared() -> None:
    trunk = nn.Linear(4, 4).requires_grad_(False)
    modules = [parallel(Net(trunk)) for _ in range(2)]
    assert len(modules) == 2


def test_gradients_before_parallelize() -> None:
    """An optimizer step without them is said to be so, once; to compare gradients is no mistake."""
    for is_cleared in (False, True):
        model = Net()
        model(**BATCH).backward()
        module = parallel(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.step(**BATCH)
        if is_cleared:
            model.zero_grad()
        else:
            with pytest.warns(UserWarning, match=r"`trunk\.weight` .* model\.zero_grad\(\)"):
                optimizer.step()
        optimizer.step()
