"""NCCL on as many GPUs as there are, one process each: training as on one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import autopar
from autopar import Manual
from tests.helpers.jobs import CASES, machine

N_STEPS = 3
LAYOUTS: dict[str, Callable[[int], Manual]] = {
    "tensor": lambda n: Manual(tp=n),
    "zero-3": lambda n: Manual(dp=n, zero=3),
    "stages": lambda n: Manual(pp=n),
}


def losses(layout: str, n: int) -> list[float]:
    """Losses of a few steps of AdamW on `n` ranks; one rank is the reference."""
    case = CASES["gpt2"]
    manual = LAYOUTS[layout](n) if n > 1 else Manual()
    pm = autopar.parallelize(
        case.model().double(), machine((1, n)), case.batch(0), precision="fp64", manual=manual,
        microbatches=n,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    out = []
    for seed in range(N_STEPS):
        out.append(pm.step(**case.batch(seed)).item())
        optimizer.step()
        optimizer.zero_grad()
    return out


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_training_is_that_of_one_process(gpu: torch.device, layout: str) -> None:
    n = 2 if torch.cuda.device_count() >= 2 else 1
    found = autopar.launch(losses, n, layout, n)
    (wanted,) = autopar.launch(losses, 1, layout, 1)
    for of_rank in found:
        assert of_rank == pytest.approx(wanted, abs=1e-10)
