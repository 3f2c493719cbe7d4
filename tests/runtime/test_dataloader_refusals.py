"""`pm.dataloader`: what is refused, and where a rank loads whole batches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autopar
from autopar import BatchError, Manual, NotSupportedError, OptionError, ParallelModule
from autopar.module import Loaded
from tests.helpers.jobs import machine
from tests.helpers.loading import (
    FILLS,
    SIZE,
    Rows,
    alone,
    make,
    parallel,
)
from tests.helpers.pools import Pool


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows())


def test_options_that_are_refused() -> None:
    pm, data = alone(), Rows()
    for text, error, given in (
        ("sampler=: the order of rows", OptionError, {"sampler": [0]}),
        ("batch_sampler=: the order", OptionError, {"batch_sampler": [[0]]}),
        ("generator=: the order", OptionError, {"generator": torch.Generator()}),
        ("rows='mine': it is one of 'auto', 'local', 'global'", OptionError, {"rows": "mine"}),
        ("pad= and drop_last=True", OptionError, {"pad": FILLS, "drop_last": True}),
    ):
        with pytest.raises(error, match=re.escape(text)):
            pm.dataloader(data, SIZE, **given)
    with pytest.raises(OptionError, match="batch_size=0"):
        pm.dataloader(data, 0)
    with pytest.raises(OptionError, match="40 rows: no batch of 64"):
        pm.dataloader(data, 64, drop_last=True)
    with pytest.raises(NotSupportedError, match="Stream, whose rows have no index"):
        pm.dataloader(Stream(), SIZE)
    with pytest.raises(NotSupportedError, match='rows="local": this plan does not split'):
        iter(pm.dataloader(data, SIZE, rows="local"))


def sizes() -> list[str]:
    """What ranks say of sizes that do not divide, before the first batch."""
    pm, found = parallel("zero-3, microbatches"), []
    for n_rows, size in ((13, SIZE), (12, 6)):
        with pytest.raises(BatchError) as refusal:
            iter(pm.dataloader(Rows(n_rows), size))
        found.append(str(refusal.value))
    assert len(list(pm.dataloader(Rows(13), SIZE, drop_last=True))) == 1
    pm.eval()
    assert [len(b["x"]) for b in pm.dataloader(Rows(13), SIZE, pad=FILLS)] == [8, 5]
    return found


def test_sizes_that_do_not_divide(workers: Pool) -> None:
    for last, every in workers(2).run(sizes):
        assert "the last batch of an epoch has 5 rows (13 rows by 8)" in last
        assert "does not divide by 4" in last
        assert "4 and 8 would" in last
        assert "drop_last=True" in last
        assert "a batch has 6 rows" in every


def misused() -> None:
    pm, other = parallel("dp"), parallel("tp")
    loader = pm.dataloader(Rows(), SIZE)
    batch = next(iter(loader))
    moved = {name: value.to("cpu") for name, value in batch.items()}
    assert isinstance(moved["batch"], Loaded)
    with pytest.raises(BatchError, match=r"a loader gave rows \(., .\) of `x`, and this rank"):
        other.step(**batch)
    for call in (pm.loss, pm.eval(), autopar.parallelize(make(), machine((1, 2))).prepare):
        with pytest.raises(BatchError, match=r"a loader made this batch for pm\.step"):
            call(**batch)
    pm.train()
    with pytest.raises(BatchError, match="differs between ranks"):
        pm.step(x=batch["x"], labels=batch["labels"])
    pm.step(**moved)
    batches = iter(parallel_of_width_6().dataloader(Rows(), SIZE))
    with pytest.raises(BatchError, match=r"rows of `x` have shape \(8,\), planned as \(6,\)"):
        next(batches)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x * self.scale, labels)


def parallel_of_width_6() -> ParallelModule:
    batch = next(iter(DataLoader(Rows(), batch_size=SIZE)))
    example = batch | {"x": batch["x"][:, :6]}
    return autopar.parallelize(Narrow(), machine((1, 2)), example, manual=Manual(dp=2))


def test_rows_of_a_rank_are_not_mistaken(workers: Pool) -> None:
    workers(2).run(misused)


def whole_rows() -> None:
    """Where a rank cannot say what it reads, or a row may depend on others."""
    pm, data = parallel("dp"), Rows()
    pairs: Any = TensorDataset(data.x, data.labels)
    for (x, labels), batch in zip(
        pm.dataloader(pairs, SIZE), DataLoader(data, batch_size=SIZE), strict=True
    ):
        assert torch.equal(x, batch["x"])
        pm.step(x=x, labels=labels)
    collated = next(iter(pm.dataloader(data, SIZE, collate_fn=centred)))
    assert "batch" not in collated
    assert collated["x"].mean().abs() < 1e-12
    assert next(iter(pm.dataloader(data, SIZE, collate_fn=centred, rows="local")))["batch"].is_local
    with pytest.raises(BatchError, match="is a dictionary without the key `batch`; it is a list"):
        list(pm.dataloader(TensorDataset(data.x[:5], data.labels[:5]), SIZE, pad=pair_of_ignored))


def centred(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = torch.utils.data.default_collate(rows)
    return batch | {"x": batch["x"] - batch["x"].mean()}


def pair_of_ignored(row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return row[0], torch.tensor(-100)


def test_whole_rows_where_parts_are_not_sound(workers: Pool) -> None:
    workers(2).run(whole_rows)
