"""Python values that change during training, on two processes: followed together, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import CaptureError, Manual
from autopar.module import job
from tests.helpers.jobs import Batch, error, machine
from tests.helpers.pools import Pool
from tests.parity.table import TOLERANCE

VALUES = (0.5, 0.25, 0.5, 0.125)
SCALE = {"loss": 1.0}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 4)
        self.beta = VALUES[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu() * self.beta)


def squares(out: Tensor, batch: Any) -> Tensor:
    return out.pow(2).sum() * SCALE["loss"]


def batch() -> Batch:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()}


def made() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def ready(manual: Manual) -> tuple[Scaled, autopar.ParallelModule]:
    model = made()
    return model, autopar.parallelize(
        model, machine((1, 2)), batch(), loss_fn=squares, manual=manual, microbatches=1
    )


def changing(manual: Manual) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, module = ready(manual)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step, beta in enumerate(VALUES):
            model.beta, SCALE["loss"] = beta, 1.0 + step // 2
            SCALE["unread"] = float(step + dist.get_rank())  # differs by rank, and no graph by it
            losses.append(module.step(**batch()))
        model.beta, SCALE["loss"] = 2.0, 1.0
        module.eval()
        out = module(**batch(), gather="all")
    return [*losses, out], module.full_gradients()


@pytest.mark.parametrize("manual", [Manual(dp=2), Manual(tp=2), Manual(pp=2)])
def test_changes_are_followed_by_all_ranks(manual: Manual, workers: Pool) -> None:
    model, wanted = made(), []
    for step, beta in enumerate(VALUES):
        model.beta = beta
        wanted.append(model(**batch()).pow(2).sum() * (1.0 + step // 2))
        wanted[-1].backward()
    model.beta = 2.0
    with torch.no_grad():
        wanted.append(model(**batch()))
    found = workers(2).run(changing, manual)
    for losses, _ in found:
        assert all(error(a, b.detach()) <= TOLERANCE for a, b in zip(losses, wanted, strict=True))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert error(found[0][1][name], parameter.grad) <= TOLERANCE


def differing() -> str:
    model, module = ready(Manual(dp=2))
    model.beta = 0.25 + dist.get_rank()
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        with pytest.raises(CaptureError) as caught:
            module.step(**batch())
    assert len([w for w in notices if "captured again" in str(w.message)]) == 1 - dist.get_rank()
    return str(caught.value)


def test_ranks_that_change_to_other_values_are_refused(workers: Pool) -> None:
    messages = workers(2).run(differing)
    assert "differs between ranks: 0.25 on rank 0, 1.25 on rank 1" in messages[0]
    assert "differs between ranks: 1.25 on rank 1, 0.25 on rank 0" in messages[1]


def alone(what: str) -> str:
    """Rank 0 sees a change; rank 1 would wait in the collectives of its step."""
    model, module = ready(Manual(dp=2))
    for _ in range(3):  # which compare the batch between ranks
        module.step(**batch())
    if dist.get_rank() == 1:
        return ""
    given = batch()
    if what == "shape":
        given = {"x": given["x"].repeat(2, 1)}
    else:
        model.beta = 0.25
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(job, "AGREE_TIMEOUT_S", 1.0)
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError) as caught:
            module.step(**given)
    return str(caught.value)


@pytest.mark.parametrize("what", ["a change of `beta` of the model", "a new shape of"])
def test_a_change_on_one_rank_alone_is_refused(what: str, workers: Pool) -> None:
    message = workers(2).run(alone, what.split()[2])[0]
    assert f"rank 0 sees {what}" in message and "rank 1 does not" in message
    assert "hint: " in message
