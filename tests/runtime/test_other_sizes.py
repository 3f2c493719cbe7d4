"""Batches of other sizes than the planned one: exact, or refused with the sizes that work."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import BatchError, Manual
from autopar.runtime.execute import Executor
from tests.helpers.jobs import machine
from tests.helpers.models.tiny_model import Tiny, batch
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

PLANS: dict[str, tuple[Manual, int, tuple[int, ...]]] = {
    "dp": (Manual(dp=2), 1, (8, 6, 2)),
    "dp, microbatches": (Manual(dp=2), 2, (8, 12, 4)),
    "tp": (Manual(tp=2), 1, (8, 6, 5, 1)),
    "zero-3": (Manual(dp=2, zero=3), 2, (8, 4)),
    "pp": (Manual(pp=2), 2, (8, 6, 2)),
}
Epoch = list[tuple[Tensor, dict[str, Tensor]]]


def doubled(seed: int, n_rows: int) -> dict[str, Any]:
    drawn = batch(seed, n_rows)
    drawn["labels"][0] = seed % 4 if n_rows == 1 else -100
    return drawn | {"x": drawn["x"].double()}


def train(plan: str) -> Epoch:
    """One step of every size, without an optimizer."""
    torch.manual_seed(0)
    manual, microbatches, sizes = PLANS[plan]
    module = autopar.parallelize(
        Tiny().double(), machine((1, 2)), doubled(0, 8), manual=manual, microbatches=microbatches
    )
    found: Epoch = []
    for k, n_rows in enumerate(sizes):
        module.zero_grad()
        found.append((module.step(**doubled(k, n_rows)), module.full_gradients()))
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_a_shorter_last_batch(plan: str, workers: Pool) -> None:
    torch.manual_seed(0)
    model = Tiny().double()
    of_ranks = workers(2).run(train, plan)
    for k, n_rows in enumerate(PLANS[plan][2]):
        model.zero_grad()
        wanted = model(**doubled(k, n_rows))
        wanted.backward()
        for found in of_ranks:
            torch.testing.assert_close(found[k][0], wanted.detach(), rtol=0, atol=1e-12)
        for name, gradient in of_ranks[0][k][1].items():
            right = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


def refused() -> str:
    manual, microbatches, _ = PLANS["dp, microbatches"]
    module = autopar.parallelize(
        Tiny(), machine((1, 2)), batch(), manual=manual, microbatches=microbatches
    )
    with pytest.raises(BatchError) as refusal:
        module.step(**batch(0, 6))
    return str(refusal.value)


def test_sizes_that_do_not_divide(workers: Pool) -> None:
    for message in workers(2).run(refused):
        assert "a batch of 6 rows does not divide by 4: 2 microbatches x 2 ranks" in message
        assert "4 and 8 would" in message
        assert "drop_last=True" in message


class Table(nn.Module):
    """Takes a table that has no rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) @ table.T, y)


def rows_and_table(n_rows: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(n_rows)
    return {
        "x": torch.randn(n_rows, 4, dtype=torch.float64, generator=generator),
        "table": torch.randn(6, 4, dtype=torch.float64, generator=generator),
        "y": torch.randint(0, 6, (n_rows,), generator=generator),
    }


@pytest.mark.filterwarnings("ignore:captured a batch")
def test_as_many_rows_as_a_table_has() -> None:
    """What has rows is decided by the planned batch, not by sizes that happen to be equal."""
    model = Table().double()
    module = autopar.parallelize(
        model, machine((1, 1)), rows_and_table(8), microbatches=2, manual=Manual()
    )
    for n_rows in (8, 6, 4):
        given = rows_and_table(n_rows)
        torch.testing.assert_close(module.step(**given), model(**given).detach())


def alone() -> autopar.ParallelModule:
    return autopar.parallelize(Tiny(), machine((1, 1)), batch())


def test_a_new_shape_is_announced_once() -> None:
    module = alone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.step(**batch())
        module.step(outputs=lambda _: None, **batch())
        module.eval()
        module(**batch())
        module.train()
    with pytest.warns(UserWarning, match=r"x float32 \(6, 8\), labels int64 \(6,\).* 1 so far"):
        module.step(**batch(0, 6))
    with pytest.warns(UserWarning, match=r"x float32 \(4, 8\), labels int64 \(4,\).* 2 so far"):
        module.loss(**batch(0, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.step(**batch(1, 6))
        module.step(**batch(1, 4))


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).square().mean()


def n_executors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Executor) for thing in gc.get_objects())


@nightly
def test_programs_are_dropped_and_freed() -> None:
    """The planned one and the last 16 used stay. A dropped one is captured again."""
    before = n_executors()
    module = autopar.parallelize(One(), machine((1, 1)), {"x": torch.ones(40, 4)})

    def train_on(*sizes: int) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for n_rows in sizes:
                module.step(x=torch.ones(n_rows, 4))
        return [str(w.message) for w in told]

    texts = train_on(*range(1, 17))
    assert ["buckets" in text for text in texts] == [False] * 5 + [True] * 11
    assert train_on(40, 1) == []
    assert len(train_on(17)) == 1  # drops that of 2 rows: 1 row was used later
    assert train_on(1, *range(3, 18), 40) == []
    assert n_executors() == before + 17
    (again,) = train_on(2)
    assert "18 so far, at most 16 are kept (1 of them again): if shapes keep changing" in again
    assert n_executors() == before + 17
