"""`pm.dataloader`: rows of each rank, training as one process does, resume, padding, refusals."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import autopar
from autopar import Manual, ParallelModule
from autopar.runtime.launch.processes import WorkerPool
from tests.helpers.jobs import machine

Pool = Callable[[int], WorkerPool]
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"manual": Manual(tp=2)},
    "dp": {"manual": Manual(dp=2)},
    "zero-3, microbatches": {"manual": Manual(dp=2, zero=3), "microbatches": 2},
    "pp": {"manual": Manual(pp=2), "microbatches": 2},
}
SIZE, N_EPOCHS, SEED = 8, 2, 5


class Rows(Dataset[dict[str, Tensor]]):
    """Vectors with classes, some of them ignored; `noise` is drawn anew at each read."""

    def __init__(self, n: int = 40, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(0, 4, (n,), generator=generator)
        self.labels[::7] = -100
        self.noise, self.n_read = noise, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.n_read += 1
        drawn = torch.randn(8, dtype=torch.float64) + random.random() + np.random.rand()
        return {"x": self.x[index] + self.noise * drawn, "labels": self.labels[index]}


class Model(nn.Module):
    """A classifier; `of` is its loss, `drop` its dropout, `norm` a norm over the batch."""

    def __init__(self, of: str = "mean", drop: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop, self.norm = nn.Dropout(drop), nn.BatchNorm1d(16) if norm else nn.Identity()
        self.of = of

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.down(self.drop(F.relu(self.norm(self.up(x)))))
        if self.of == "rows":
            return F.cross_entropy(logits, labels, reduction="sum") / len(labels)
        if self.of == "zero":  # the same for every row at first
            return F.cross_entropy(0 * logits, labels.clamp(min=0)) + logits.square().mean()
        return F.cross_entropy(logits, labels, reduction=self.of)


def make(**how: Any) -> Model:
    torch.manual_seed(0)
    return Model(**how).double()


def parallel(plan: str, n_rows: int = SIZE, **how: Any) -> ParallelModule:
    example = next(iter(DataLoader(Rows(), batch_size=n_rows)))
    return autopar.parallelize(make(**how), machine((1, 2)), example, **PLANS[plan])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=name)


# -- rows and training ---------------------------------------------------------------------------


def epoch_order(n: int, epoch: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def seen(plan: str, n_workers: int) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """The batches of an epoch on this rank, the slices that it reads, and how many rows it read."""
    pm, data = parallel(plan), Rows()
    loader = pm.dataloader(data, SIZE, shuffle=True, seed=SEED, num_workers=n_workers)
    batches = [dict(batch) for batch in loader]
    return batches, {name: pm.local_slice(name) for name in ("x", "labels")}, data.n_read


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_have_the_rows_they_read(plan: str, workers: Pool) -> None:
    """Together they are the global batch, in the order of seed and epoch."""
    of_ranks, data = workers(2).run(seen, plan, 0), Rows()
    splits = PLANS[plan]["manual"].dp == 2
    for k, first in enumerate(range(0, len(data), SIZE)):
        index = epoch_order(len(data), 0)[first : first + SIZE]
        found: dict[str, set[int]] = {"x": set(), "labels": set()}
        for batches, slices, n_read in of_ranks:
            assert ("batch" in batches[k]) == splits
            assert n_read == (len(data) // 2 if splits else len(data))
            for name in found:
                of = slices[name] if splits else slice(0, SIZE)
                whole = getattr(data, name)[index]
                torch.testing.assert_close(batches[k][name], whole[of], rtol=0, atol=0)
                found[name] |= {*range(SIZE)[of]}
        assert found == {"x": {*range(SIZE)}, "labels": {*range(SIZE)}}


def train(plan: str, n_workers: int = 0, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Epochs with rows on a last, shorter batch, and an evaluation after each."""
    pm = parallel(plan)
    optimizer, losses = optimizer_of(pm), []
    loader = pm.dataloader(Rows(44), SIZE, shuffle=True, seed=SEED, num_workers=n_workers, **how)
    held_out = pm.dataloader(Rows(13), SIZE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="captured a batch")
        for epoch in range(N_EPOCHS):
            loader.set_epoch(epoch)
            for batch in loader:
                losses.append(pm.step(**batch).item())
                optimizer.step()
                optimizer.zero_grad()
            pm.eval()
            losses += [pm.loss(**batch).item() for batch in held_out]
            pm.train()
    return losses, pm.full_state_dict()


def train_alone() -> tuple[list[float], dict[str, Tensor]]:
    model, data = make(), Rows(44)
    optimizer, losses = optimizer_of(model), []
    for epoch in range(N_EPOCHS):
        order: Any = epoch_order(len(data), epoch)
        for batch in DataLoader(data, batch_size=SIZE, sampler=order):
            loss = model(**batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [model(**b).item() for b in DataLoader(Rows(13), batch_size=SIZE)]
    return losses, model.state_dict()


@pytest.mark.parametrize("rows", ["auto", "global"])
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_that_of_one_process(plan: str, rows: str, workers: Pool) -> None:
    """With a plain DataLoader; the last batch has 4 rows."""
    wanted_losses, wanted = train_alone()
    of_ranks = workers(2).run(train, plan, 0) if rows == "auto" else workers(2).run(whole, plan)
    for losses, _ in of_ranks:
        assert losses == pytest.approx(wanted_losses, rel=0, abs=1e-10)
    assert_near(of_ranks[0][1], wanted)


def whole(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(plan, rows="global")


def test_workers_change_nothing(workers: Pool) -> None:
    one, two = workers(2).run(train, "dp", 0), workers(2).run(train, "dp", 2)
    assert one[0][0] == two[0][0]
    for name, value in one[0][1].items():
        assert torch.equal(value, two[0][1][name])
