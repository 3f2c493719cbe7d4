"""Losses and gradients that are not finite: refused before parameters change, or left out."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Manual, NonFiniteError
from tests.helpers.jobs import machine, rank
from tests.helpers.pools import Pool

MESH = machine((1, 2))
PLANS = {"dp": Manual(dp=2), "zero3": Manual(dp=2, zero=3), "tp": Manual(tp=2), "pp": Manual(pp=2)}


class Normed(nn.Module):
    """A batch norm, whose buffers a bad batch would ruin."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        found = self.down(torch.relu(self.up(self.norm(x)))).squeeze(1)
        return ((found - labels) ** 2).mean()


def good(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 8, generator=generator),
        "labels": torch.randn(8, generator=generator),
    }


def bad(value: float = torch.nan) -> dict[str, Any]:
    batch = good(9)
    batch["x"][3, 2] = value
    return batch


def made(plan: str) -> tuple[autopar.ParallelModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = autopar.parallelize(Normed(), MESH, good(), manual=PLANS[plan], precision="fp64")
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def held(module: autopar.ParallelModule) -> dict[str, Any]:
    shards = {name: shard.tolist() for name, shard in module.shards.items()}
    return shards | {name: buffer.tolist() for name, buffer in module.named_buffers()}


def refused(plan: str) -> tuple[str, bool]:
    module, optimizer = made(plan)
    module.step(**good())
    optimizer.step()
    optimizer.zero_grad()
    before = {name: shard.tolist() for name, shard in module.shards.items()}
    assert module.step(**bad()).isnan()
    with pytest.raises(NonFiniteError) as refusal:
        optimizer.step()
    unchanged = before == {name: shard.tolist() for name, shard in module.shards.items()}
    optimizer.zero_grad()  # goes on, as the message says
    module.step(**good(), skip_nonfinite=False)
    optimizer.step()
    return str(refusal.value), unchanged


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_does_not_take_nan(plan: str, workers: Pool) -> None:
    for message, unchanged in workers(2).run(refused, plan):
        assert message.startswith("the loss of step 2 is nan. Not finite are\n  gradients on rank")
        assert "skip_nonfinite=True" in message and "no parameter has changed" in message
        assert unchanged


def handled_by_the_user() -> list[float]:
    """A script that looks at the loss itself."""
    module, optimizer = made("dp")
    losses = []
    for batch in (good(), bad(), good(1)):
        loss = module.step(**batch, skip_nonfinite=None)
        if loss.isfinite():
            optimizer.step()
            losses.append(loss.item())
        optimizer.zero_grad()
    return losses


def test_a_script_may_drop_the_gradients_itself(workers: Pool) -> None:
    for losses in workers(2).run(handled_by_the_user):
        assert len(losses) == 2 and all(map(math.isfinite, losses))


def trained(plan: str, with_bad: bool) -> dict[str, Any]:
    """What a rank holds after three good steps, and a bad one in between or not."""
    module, optimizer = made(plan)
    for n in range(3):
        module.step(**good(n), skip_nonfinite=True)
        if with_bad:
            module.step(**bad(torch.inf), skip_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
    return held(module)


def skipped(plan: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(plan, with_bad=True)
    told = [str(w.message) for w in seen if "is skipped" in str(w.message)]
    return found, trained(plan, with_bad=False), told


@pytest.mark.parametrize("plan", PLANS)
def test_a_skipped_step_changes_nothing(plan: str, workers: Pool) -> None:
    """Neither earlier gradients nor buffers; bitwise, on every rank."""
    of_ranks = workers(2).run(skipped, plan)
    for n, (found, wanted, told) in enumerate(of_ranks):
        assert found == wanted
        assert len(told) == (3 if n == 0 else 0)
    assert "step 2 is skipped: the loss is nan" in of_ranks[0][2][0]


def bad_gradient_alone() -> tuple[str, float]:
    """A finite loss of NaN gradients, on the rank of the first stage alone: seen one step later."""
    module, optimizer = made("pp")
    module.step(**good())
    if rank() == 0:
        next(iter(module.shards.values())).grad.fill_(torch.nan)  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    module.step(**good())
    with pytest.raises(NonFiniteError) as refusal:
        optimizer.step()
    return str(refusal.value), module.clip_grad_norm_(1.0).item()


def test_parameters_that_are_ruined_are_named(workers: Pool) -> None:
    for message, norm in workers(2).run(bad_gradient_alone):
        assert "parameters on rank 0: `norm." in message and "load the last checkpoint" in message
        assert norm != norm
