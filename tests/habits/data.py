"""Habits about batches and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from autopar import BatchError, NotSupportedError, OptionError
from tests.habits.table import BOTH, ROWS, Batch, Run, Small, captured_anew, habit
from tests.habits.table import ZERO_FIRST as ALL

SECTION = "Batches and losses"


class Pair(Small):
    """Returns (logits, loss), as nanoGPT does."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = self.body(ids)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Named(Small):
    """Returns a dict with one loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = self.body(ids)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"logits": logits, "objective": total, "count": ids.numel()}


class Logits(Small):
    """Returns logits; the loss is a function beside it."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.body(ids)


def cross_entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def train(run: Run, loss_alone: Callable[[Batch], Tensor]) -> None:
    optimizers = run.optimizers()
    for batch in map(run.batch, range(2)):
        wanted = loss_alone(batch)
        wanted.backward()
        run.losses.append((run.pm.step(**batch).item(), wanted.item()))
        run.update(optimizers)


@habit(SECTION, "a model that returns `(logits, loss)`", kind=Pair, layouts=ALL)
def logits_and_loss(run: Run) -> None:
    train(run, lambda batch: run.alone(**batch)[1])


@habit(SECTION, "a model that returns a dict with one scalar that requires grad", kind=Named)
def loss_in_a_dict(run: Run) -> None:
    train(run, lambda batch: run.alone(**batch)["objective"])


@habit(SECTION, "`criterion(model(x), y)`", "`loss_fn=(outputs, batch) -> loss`", kind=Logits,
       layouts=ALL, loss_fn=cross_entropy)  # fmt: skip
def loss_beside_the_model(run: Run) -> None:
    train(run, lambda batch: cross_entropy(run.alone(batch["ids"]), batch))
    run.pm.eval()
    with torch.no_grad():
        batch = run.batch(7)
        wanted = cross_entropy(run.alone(batch["ids"]), batch)
        assert abs(run.pm.loss(**batch) - wanted) < 1e-10
        logits = run.pm(**batch, gather="all")
        torch.testing.assert_close(logits, run.alone(batch["ids"]), rtol=0, atol=1e-10)
    run.pm.train()


@habit(SECTION, "`DistributedSampler`: every rank has its own rows",
       'every rank passes the whole batch, or `batch="local"`',
       refused=(BatchError, 'batch="local"'), layouts=ALL)  # fmt: skip
def own_rows(run: Run) -> None:
    whole = run.batch(0, rows=2 * ROWS)
    data = TensorDataset(whole["ids"], whole["targets"])
    loader: Any = DataLoader(data, batch_size=ROWS, sampler=DistributedSampler(data, shuffle=False))
    (ids, targets), *_ = loader
    run.pm.step(ids=ids, targets=targets)


@habit(SECTION, '`pm.step(..., batch="local")` with the rows of `pm.local_slice`', layouts=ALL)
def local_rows(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(2):
        batch = run.batch(seed)
        slices = {name: run.pm.local_slice(name) for name in batch}
        own = {name: batch[name][rows] for name, rows in slices.items() if rows is not None}
        wanted = run.alone(**batch)
        wanted.backward()
        run.losses.append((run.pm.step(**own, batch="local").item(), wanted.item()))
        run.update(optimizers)


@habit(SECTION, "the same loader on every rank: `shuffle=True` with one seed", layouts=ALL)
def shuffled(run: Run) -> None:
    whole = run.batch(0, rows=3 * ROWS)
    data = TensorDataset(whole["ids"], whole["targets"])
    generator = torch.Generator().manual_seed(5)
    loader: Any = DataLoader(data, batch_size=ROWS, shuffle=True, generator=generator)
    optimizers = run.optimizers()
    for ids, targets in loader:
        run.backward({"ids": ids, "targets": targets})
        run.update(optimizers)


@habit(SECTION, "a loader whose order differs by rank", "seed the loader alike on all ranks",
       refused=(BatchError, "rank"))  # fmt: skip
def shuffled_differently(run: Run) -> None:
    run.pm.step(**run.batch(dist.get_rank()))


class Pieces(Dataset[dict[str, Tensor]]):
    """Rows as dictionaries."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self.batch.items()}


def order_of(n: int, seed: int, epoch: int) -> Any:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


@habit(SECTION, "`DataLoader(dataset, n, shuffle=True)` and `for batch in loader`",
       "`pm.dataloader(dataset, n, shuffle=True)`; each rank loads the rows that it reads",
       layouts=ALL)  # fmt: skip
def loader_of_the_module(run: Run) -> None:
    data = Pieces(run.batch(0, rows=3 * ROWS))
    loader = run.pm.dataloader(data, ROWS, shuffle=True, seed=5)
    optimizers = run.optimizers()
    for epoch in range(2):
        loader.set_epoch(epoch)
        plain: Any = DataLoader(data, ROWS, sampler=order_of(len(data), 5, epoch))
        for batch, whole in zip(loader, plain, strict=True):
            step_on(run, optimizers, batch, whole)


def step_on(run: Run, optimizers: Any, batch: Batch, whole: Batch) -> None:
    """A step on a batch of the module's loader, and one alone on the same rows."""
    wanted = run.alone(**whole)
    wanted.backward()
    run.losses.append((run.pm.step(**batch).item(), wanted.item()))
    run.update(optimizers)


@habit(SECTION, "a last batch that does not divide, with labels that the loss ignores",
       '`pm.dataloader(..., pad={"ids": 0, "targets": -100})`, which checks it',
       layouts=ALL)  # fmt: skip
def last_batch_padded(run: Run) -> None:
    data = Pieces(run.batch(0, rows=2 * ROWS - 1))
    optimizers = run.optimizers()
    loader = run.pm.dataloader(data, ROWS, pad={"ids": 0, "targets": -100})
    for batch, whole in zip(loader, DataLoader(data, ROWS), strict=True):
        step_on(run, optimizers, batch, whole)


@habit(SECTION, "padding that the loss counts", "`drop_last=True`", layouts=ALL,
       refused=(BatchError, "padding is not exact"))  # fmt: skip
def last_batch_padded_wrongly(run: Run) -> None:
    data = Pieces(run.batch(0, rows=ROWS - 1))
    for batch in run.pm.dataloader(data, ROWS, pad={"ids": 0, "targets": 0}):
        run.pm.step(**batch)


@habit(SECTION, "a loader that goes on in the middle of an epoch",
       "`loader.state_dict()`, as `extra=` of `autopar.save`", layouts=BOTH)  # fmt: skip
def loader_resumed(run: Run) -> None:
    data = Pieces(run.batch(0, rows=3 * ROWS))
    optimizers = run.optimizers()
    first, second = (run.pm.dataloader(data, ROWS, shuffle=True, seed=5) for _ in range(2))
    plain: Any = DataLoader(data, ROWS, sampler=order_of(len(data), 5, 0))
    for batch, whole in zip(first, plain, strict=False):
        step_on(run, optimizers, batch, whole)
        break
    second.load_state_dict(first.state_dict())
    for batch, whole in zip(second, list(plain)[1:], strict=True):
        step_on(run, optimizers, batch, whole)


@habit(SECTION, "`pm.dataloader` of an `IterableDataset`",
       "torch's `DataLoader`, with the same stream on every rank",
       refused=(NotSupportedError, "no index"))  # fmt: skip
def loader_of_a_stream(run: Run) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([run.batch(0)])

    run.pm.dataloader(Stream(), ROWS)


@habit(SECTION, "a last, shorter batch", "captured anew, with a notice")
def shorter(run: Run) -> None:
    optimizers = run.optimizers()
    with captured_anew():
        for rows in (ROWS, ROWS // 2, ROWS):
            run.backward(run.batch(rows, rows=rows))
            run.update(optimizers)


@habit(SECTION, "a last batch that does not divide", "`drop_last=True`, or the sizes it names",
       layouts=("zero3",), refused=(BatchError, "drop_last"))  # fmt: skip
def indivisible(run: Run) -> None:
    with captured_anew():
        run.pm.step(**run.batch(0, rows=ROWS - 1))


@habit(SECTION, "sequences of several lengths", "captured anew, with a notice; 16 are kept",
       layouts=ALL)  # fmt: skip
def lengths(run: Run) -> None:
    optimizers = run.optimizers()
    with captured_anew():
        for length in (3, 6, 3):
            run.backward(run.batch(length, length=length))
            run.update(optimizers)


@habit(SECTION, "ids as floats", "as eager: the model does not take them",
       refused=(BatchError, "float"))  # fmt: skip
def float_ids(run: Run) -> None:
    batch = run.batch(0)
    run.pm.step(ids=batch["ids"].double(), targets=batch["targets"])


@habit(SECTION, "a misspelled key: `pm.step(ids=..., target=...)`", "the keys there are",
       refused=(BatchError, "targets"))  # fmt: skip
def misspelled(run: Run) -> None:
    batch = run.batch(0)
    run.pm.step(ids=batch["ids"], target=batch["targets"])


@habit(SECTION, "`pm.step` under `torch.no_grad()`", "call it outside, or `pm.loss`",
       refused=(OptionError, "no_grad"))  # fmt: skip
def no_grad(run: Run) -> None:
    with torch.no_grad():
        run.pm.step(**run.batch(0))


@habit(SECTION, "evaluation between steps: `pm.eval()`, `pm(**batch)`, `pm.train()`", layouts=ALL)
def evaluated(run: Run) -> None:
    optimizers = run.optimizers()
    for seed in range(2):
        run.train(optimizers, 1, first=seed)
        run.pm.eval()
        with torch.no_grad():
            found, wanted = run.pm(**run.batch(9)), run.alone(**run.batch(9))
        assert abs(found - wanted) < 1e-10
        run.pm.train()
