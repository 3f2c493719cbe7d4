"""`pm.dataloader(pad=)`: exact to rounding, or refused on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import autopar
from autopar import BatchError
from tests.helpers.jobs import machine
from tests.helpers.loading import (
    FILLS,
    PLANS,
    SIZE,
    Model,
    Rows,
    alone,
    assert_near,
    make,
    parallel,
)
from tests.helpers.nightly import nightly, one_in
from tests.helpers.pools import Pool


def padded(plan: str, n_rows: int, how: dict[str, Any], pad: Any) -> tuple[Any, ...]:
    """Losses and gradients of the batches of an epoch; nothing is captured for a shorter one."""
    pm = parallel(plan, **how)
    buffers = {name: value.clone() for name, value in pm.named_buffers()}
    found, marks = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "captured a batch")
        for batch in pm.dataloader(Rows(n_rows), SIZE, pad=pad):
            pm.zero_grad()
            marks.append(batch.get("batch"))
            found.append((pm.step(**batch).item(), pm.full_gradients()))
    assert all(torch.equal(pm.get_buffer(name), value) for name, value in buffers.items())
    return found, [mark and (mark.n_padded, mark.is_local) for mark in marks]


@one_in(3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("n_rows", [13, 9])
def test_padding_is_exact(plan: str, n_rows: int, workers: Pool) -> None:
    """A last batch of 5 rows, and of 1."""
    model, last = make(), n_rows - SIZE
    found, marks = workers(2).run(padded, plan, n_rows, {}, FILLS)[0]
    splits = PLANS[plan]["manual"].dp == 2
    assert marks == [(0, True) if splits else None, (SIZE - last, False)]
    for (loss, gradients), batch in zip(found, DataLoader(Rows(n_rows), SIZE), strict=True):
        model.zero_grad()
        wanted = model(**batch)
        wanted.backward()
        assert abs(loss - wanted.item()) < 1e-10
        assert_near(gradients, {n: p.grad for n, p in model.named_parameters()})  # type: ignore[misc]


def ignored(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return row | {"labels": torch.tensor(-100)}


@nightly
def test_padding_by_a_function_and_with_dropout(workers: Pool) -> None:
    """Dropout of a row depends on its position, so it is that of the row without padding."""
    for plan in ("dp", "zero-3, microbatches"):
        filled = workers(2).run(padded, plan, 13, {"drop": 0.5}, FILLS)[0][0]
        made = workers(2).run(padded, plan, 13, {"drop": 0.5}, ignored)[0][0]
        assert filled[1][0] == pytest.approx(made[1][0], rel=0, abs=1e-12)


def refused_padding(plan: str, how: dict[str, Any], pad: dict[str, Any]) -> str:
    pm = parallel(plan, **how)
    buffers = {name: value.clone() for name, value in pm.named_buffers()}
    with pytest.raises(BatchError, match="padding is not exact") as refusal:
        iter(pm.dataloader(Rows(13), SIZE, pad=pad))
    assert all(p.grad is None for p in pm.parameters())
    assert all(torch.equal(pm.get_buffer(name), value) for name, value in buffers.items())
    return str(refusal.value)


INEXACT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "labels that count": ({}, {"x": 0.0, "labels": 0}, "the loss changes by"),
    "a mean over rows": ({"of": "rows"}, FILLS, "the loss changes by"),
    "statistics of the batch": ({"norm": True}, FILLS, "the loss changes by"),
}


@pytest.mark.parametrize("name", INEXACT)
def test_padding_that_counts_is_refused(name: str, workers: Pool) -> None:
    """Before the epoch, on every rank, and nothing is left of the check."""
    how, pad, words = INEXACT[name]
    for message in workers(2).run(refused_padding, "dp", how, pad):
        assert "with 4 rows of padding beside 4 rows of data" in message
        assert words in message
        assert "drop_last=True" in message


def test_padding_that_shows_in_gradients_alone() -> None:
    """Equal losses are no proof: a head of zeros gives every row the same loss."""
    model = make()
    nn.init.zeros_(model.down.weight)
    nn.init.zeros_(model.down.bias)
    example = next(iter(DataLoader(Rows(), batch_size=SIZE)))
    pm = autopar.parallelize(model, machine((1, 1)), example)
    with pytest.raises(BatchError, match=r"the gradient of `down\.bias` changes by"):
        iter(pm.dataloader(Rows(13), SIZE, pad={"x": 1.0, "labels": 0}))


class Weak(Model):
    """A term of a millionth is a mean over all rows, as losses of routers are."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weak: Tensor = 1e-6 * self.up(x).float().square().mean()
        return super().forward(x, labels).float() + weak


@one_in(3)
@pytest.mark.parametrize("precision", ["model", "bf16-mixed", "bf16-autocast"])
def test_a_weak_term_counts_in_any_precision(precision: str) -> None:
    """Far below the rounding of bfloat16, in which the step itself runs."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "labels": torch.tensor(k % 4)} for k in range(13)]
    example = default_collate(data[:SIZE])
    pm = autopar.parallelize(Weak(), machine((1, 1)), example, precision=precision)
    with pytest.raises(BatchError, match="padding is not exact"):
        iter(pm.dataloader(data, SIZE, pad=FILLS))


def test_without_a_plan_the_first_padded_step_checks() -> None:
    pm = autopar.parallelize(make(of="rows"), machine((1, 1)))
    first, last = pm.dataloader(Rows(13), SIZE, pad=FILLS)
    pm.step(**first)
    pm.zero_grad()
    with pytest.raises(BatchError, match="padding is not exact"):
        pm.step(**last)
    assert all(p.grad is None for p in pm.parameters())


@pytest.mark.parametrize(
    ("pad", "text"),
    [
        ({"labels": -100}, r"pad= has values for \['labels'\], and rows have \['labels', 'x'\]"),
        (FILLS | {"y": 0}, r"and rows have \['labels', 'x'\]"),
    ],
)
def test_padding_names_every_input(pad: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        list(alone().dataloader(Rows(13), SIZE, pad=pad))


class AtOnce(Rows):
    """Rows are read many at once, as Hugging Face datasets do."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.n_read += 1
        return [{"x": self.x[i].tolist(), "labels": int(self.labels[i])} for i in indices]


def stacked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": torch.tensor([row["x"] for row in rows], dtype=torch.float64),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def test_rows_that_are_read_at_once_and_are_plain_lists() -> None:
    pm, data = alone(), AtOnce(13)
    batches = list(pm.dataloader(data, SIZE, collate_fn=stacked, pad=FILLS))
    assert data.n_read == 3  # the last one before the epoch, too
    assert torch.equal(batches[1]["x"][:5], data.x[8:])
    assert (batches[1]["x"][5:] == 3.0).all()
    assert (batches[1]["labels"][5:] == -100).all()


@one_in(3)
@pytest.mark.parametrize("precision", ["model", "bf16-mixed", "fp16-mixed"])
def test_rounding_is_told_from_padding(precision: str) -> None:
    """With dropout, in float32 and in half precision."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "labels": torch.tensor(k % 4)} for k in range(13)]
    example = default_collate(data[:SIZE])
    pm = autopar.parallelize(Model(drop=0.1), machine((1, 1)), example, precision=precision)
    for batch in pm.dataloader(data, SIZE, pad=FILLS):
        assert pm.step(**batch).isfinite()
    with pytest.raises(BatchError, match="padding is not exact"):
        iter(pm.dataloader(data, SIZE, pad=FILLS | {"labels": 0}))
