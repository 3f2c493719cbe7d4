"""Losses that are no sum over rows: microbatches compute what a loop over `batch.chunk(n)` does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import Device, Link, Manual, Mesh
from autopar.capture import whole_buffers
from autopar.errors import BatchError, NotSupportedError
from autopar.parity import reference, whole_parameters
from autopar.program.graph import flatten_inputs
from autopar.runtime.launch import WorkerPool
from tests.helpers.nightly import nightly, one_in, sampled

# A slow device with fast links: all sharding pays.
MESH = Mesh((1, 2), links=[Link(1e-9, 1e-15)] * 2, device=Device(1e6, 1e6, 1e12))
PLANS: dict[str, dict[str, Any]] = {
    "searched": {},
    "tensor": {"forbid": ("data",)},
    "data": {"manual": Manual(dp=2)},
    "zero-3": {"manual": Manual(dp=2, zero=3)},
    "stages": {"manual": Manual(pp=2)},
}


class Contrastive(nn.Module):
    """Compares every row of one side with every row of the other, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        scores = F.normalize(self.left(image)) @ F.normalize(self.drop(self.right(text))).T
        target = torch.arange(len(image))
        return F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)


class Normalised(nn.Module):
    """A batch norm, and labels some of which are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def contrastive() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Contrastive().double(), {
        "image": torch.randn(8, 6, dtype=torch.float64),
        "text": torch.randn(8, 4, dtype=torch.float64),
    }


def normalised() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    labels = torch.randint(0, 4, (8,))
    labels[[1, 4]] = -100
    return Normalised().double(), {"x": torch.randn(8, 6, dtype=torch.float64), "y": labels}


CASES = {"contrastive": contrastive, "normalised": normalised}


def loop(model: nn.Module, batch: dict[str, Tensor], n: int) -> tuple[Tensor, nn.Module]:
    """The loop that a user writes on one process: (loss, model with its gradients)."""
    alone = copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)
    for rows in zip(*(v.chunk(n) for v in batch.values()), strict=True):
        loss = alone(*rows) / n
        loss.backward()
        total = total + loss.detach()
    return total, alone


@one_in(3)
@pytest.mark.parametrize(
    ("case", "plan"),
    sampled(
        [(case, plan) for case in CASES for plan in PLANS],
        [
            ("normalised", "searched"),
            ("contrastive", "tensor"),
            ("normalised", "data"),
            ("contrastive", "zero-3"),
            ("normalised", "stages"),
        ],
    ),
)
def test_one_process_with_as_many_parts(case: str, plan: str) -> None:
    model, batch = CASES[case]()
    with pytest.warns(UserWarning, match="the mean of the losses of 4 parts"):
        report = autopar.verify(model, MESH, batch, microbatches=4, **PLANS[plan])
    assert report.plan is not None and report.plan.microbatches == 4
    report.raise_if_wrong()
    assert report.worst <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_users_loop(case: str) -> None:
    model, batch = CASES[case]()
    total, alone = loop(model, batch, 4)
    with pytest.warns(UserWarning, match="gradient accumulation"):
        plan = autopar.plan(model, MESH, batch, microbatches=4)
    assert plan.bound is not None
    program = plan.bound.analysis.program
    step = reference(
        program, whole_parameters(program, model), flatten_inputs(batch),
        whole_buffers(program, model), 4,
    )  # fmt: skip
    torch.testing.assert_close(step.loss, total, rtol=0, atol=1e-12)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=0, atol=1e-12)
    for name, value in step.buffers.items():
        torch.testing.assert_close(value, alone.get_buffer(name), rtol=0, atol=1e-12)


def test_a_sum_over_rows_is_not_accumulated() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    batch = (torch.randn(8, 6),)
    plan = autopar.plan(
        model, MESH, batch, microbatches=4, loss_fn=lambda out, _: out.square().mean()
    )
    assert not plan.data.accumulates


def test_on_its_own_the_planner_takes_one() -> None:
    model, batch = contrastive()
    assert autopar.plan(model, MESH, batch).microbatches == 1


def test_a_plan_of_parts_is_read_back(tmp_path: Any) -> None:
    model, batch = contrastive()
    with pytest.warns(UserWarning, match="gradient accumulation"):
        plan = autopar.plan(model, MESH, batch, microbatches=2)
    plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json").bind(model, MESH)
    assert again.predicted == plan.predicted
    assert again.code() == plan.code()


def test_parts_that_do_not_divide() -> None:
    model, batch = contrastive()
    with pytest.raises(BatchError, match="8 rows does not divide into 3 microbatches"):
        autopar.plan(model, MESH, batch, microbatches=3)


def _train(rank_case: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, made = CASES[rank_case]()
    batch: dict[str, Any] = dict(made)
    with pytest.warns(UserWarning, match="gradient accumulation"):
        module = autopar.parallelize(model, (1, 2), batch, microbatches=2, manual=Manual(dp=2))
    with pytest.raises(NotSupportedError, match="a local batch of microbatches"):
        module.step(**batch, batch="local")
    assert module.local_slice(next(iter(batch))) == slice(0, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(module.step(**batch))
        optimizer.step()
        optimizer.zero_grad()
    return losses, module.full_state_dict()


@pytest.mark.parametrize("case", ["normalised", pytest.param("contrastive", marks=nightly)])
def test_training_on_processes(case: str, workers: Any) -> None:
    pool: WorkerPool = workers(2)
    losses, state = pool.run(_train, case)[0]
    model, batch = CASES[case]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        total, alone = loop(model, batch, 2)
        torch.testing.assert_close(loss, total, rtol=0, atol=1e-10)
        model.load_state_dict(alone.state_dict())
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            mine.grad = other.grad
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)
