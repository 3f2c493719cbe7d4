"""`pm.dataloader`: rows of each rank, resume, refusals, and where a rank loads whole batches."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import autopar
from autopar import BatchError, Manual, NotSupportedError, OptionError, ParallelModule
from autopar.module import Loaded
from tests.helpers.jobs import advance, machine
from tests.helpers.loading import (
    FILLS,
    PLANS,
    SEED,
    SIZE,
    Rows,
    alone,
    assert_near,
    make,
    optimizer_of,
    parallel,
)
from tests.helpers.nightly import nightly
from tests.helpers.pools import Pool

N_EPOCHS = 2


# -- rows ---------------------------------------------------------------------------


def epoch_order(n: int, epoch: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def seen(plan: str) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """The batches of an epoch on this rank, the slices that it reads, and how many rows it read."""
    pm, data = parallel(plan), Rows()
    loader = pm.dataloader(data, SIZE, shuffle=True, seed=SEED)
    batches = [dict(batch) for batch in loader]
    return batches, {name: pm.local_slice(name) for name in ("x", "labels")}, data.n_read


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_have_the_rows_they_read(plan: str, workers: Pool) -> None:
    """Together they are the global batch, in the order of seed and epoch."""
    of_ranks, data = workers(2).run(seen, plan), Rows()
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


# -- resume ----------------------------------------------------------------------------------------


def train_and_stop(path: str, stop: int | None, n_workers: int) -> dict[str, Tensor]:
    """Two epochs of noisy rows; a checkpoint in the middle of the second."""
    pm = parallel("dp")
    optimizer, loader = optimizer_of(pm), noisy(pm, num_workers=n_workers)
    for _ in range(N_EPOCHS):
        for k, batch in enumerate(loader):
            pm.step(**batch)
            advance(optimizer)
            if loader.state_dict()["epoch"] == 1 and k + 1 == stop:
                extra = {"loader": loader.state_dict()}
                autopar.save(pm, optimizer, path, step=k, extra=extra)
                return pm.full_state_dict()
    return pm.full_state_dict()


def noisy(pm: ParallelModule, **how: Any) -> Any:
    data = Subset(Rows(80, noise=0.1), range(40))
    return pm.dataloader(data, SIZE, shuffle=True, seed=SEED, **how)


def resume(plan: str, path: str, rows: str) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    pm = parallel(plan)
    optimizer, loader = optimizer_of(pm), noisy(pm, rows=rows)
    _, extra = autopar.load(pm, optimizer, path)
    loader.load_state_dict(extra["loader"])
    loader.set_epoch(1)  # as loops over epochs do
    n_left = 0
    for batch in loader:
        pm.step(**batch)
        advance(optimizer)
        n_left += 1
    return loader.state_dict(), pm.full_state_dict(), n_left


@pytest.mark.parametrize(
    ("n_workers", "plans"),
    [(0, ("pp",)), pytest.param(2, ("tp", "zero-3, microbatches", "pp"), marks=nightly)],
)
def test_resume_in_the_middle_of_an_epoch(
    n_workers: int, plans: tuple[str, ...], workers: Pool, tmp_path: Path
) -> None:
    """Bitwise; on another layout to 1e-10. The rows' random numbers are those of the first run."""
    path = str(tmp_path / "checkpoint")
    wanted = workers(2).run(train_and_stop, path, None, 0)[0]
    stopped = workers(2).run(train_and_stop, path, 2, n_workers)[0]
    assert any(not torch.equal(stopped[name], wanted[name]) for name in wanted)
    for rows in ("auto", "global"):
        state, found, n_left = workers(2).run(resume, "dp", path, rows)[0]
        assert (state["epoch"], state["next_batch"], n_left) == (2, 0, 3)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), rows
    for plan in plans:
        assert_near(workers(2).run(resume, plan, path, "auto")[0][1], wanted)


def first_of(loader: Any) -> Tensor:
    return next(iter(loader))["x"]


def test_epochs_and_states() -> None:
    loader = alone().dataloader(Rows(20, noise=1.0), 8, shuffle=True, seed=SEED)
    before = torch.get_rng_state(), random.getstate()
    first, second = [list(loader) for _ in range(2)]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert len(loader) == len(first) == 3
    assert not torch.equal(first[0]["x"], second[0]["x"])
    loader.set_epoch(0)
    assert torch.equal(first_of(loader), first[0]["x"])
    assert loader.state_dict()["next_batch"] == 1
    assert torch.equal(first_of(loader), second[0]["x"])  # an iteration that was left is over
    loader.set_epoch(0)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    inside = json.loads(json.dumps(loader.state_dict()))
    assert next(batches, None) is None
    outside = loader.state_dict()
    assert (inside["epoch"], inside["next_batch"]) == (0, 3)
    assert (outside["epoch"], outside["next_batch"]) == (1, 0)
    other = alone().dataloader(Rows(20, noise=1.0), 8, shuffle=True)
    other.load_state_dict(inside)
    assert list(other) == []  # the end of epoch 0, which was not left
    assert torch.equal(first_of(other), second[0]["x"])
    with pytest.raises(OptionError, match=r"'batch_size': 8.*; this one has .*'batch_size': 4"):
        alone().dataloader(Rows(20), 4, shuffle=True).load_state_dict(inside)


def test_a_seed_is_rank_0s() -> None:
    pm = alone()
    torch.manual_seed(11)
    loader = pm.dataloader(Rows(), SIZE, shuffle=True)
    assert loader.state_dict()["seed"] == 11


def unplanned() -> list[bool]:
    """Whether batches are of this rank's rows, in the epoch that plans and in the next one."""
    pm = autopar.parallelize(make(), machine((1, 2)), manual=Manual(dp=2))
    loader, found = pm.dataloader(Rows(16), SIZE), []
    for _ in range(2):
        for batch in loader:
            found.append("batch" in batch)
            pm.step(**batch)
    return found


def test_the_first_batch_may_plan(workers: Pool) -> None:
    assert workers(2).run(unplanned) == [[False, False, True, True]] * 2


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
