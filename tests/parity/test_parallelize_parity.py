"""Parity on real processes: a fixed sample of the table that `make parity` runs whole.

Losses, every gradient, and every parameter after three AdamW steps equal one process in float64 to
1e-10. Labels are ignored unevenly; those of one row are all ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import CASES, PLANS, Cell, reference
from tests.parity.table import MODELS, SHAPES, cells, wrong

SAMPLE = (
    Cell("gpt2", (1, 2), "auto", 1),
    Cell("gpt2", (1, 2), "sequence", 4),
    Cell("gpt2", (2, 2), "megatron", 4),
    Cell("gpt2", (2, 2), "auto", 4),
    Cell("llama", (1, 2), "zero-3", 4),
    Cell("llama", (1, 4), "megatron", 1),
    Cell("llama", (2, 2), "sequence", 1),
    Cell("llama", (1, 2), "zero-2", 4),
    Cell("mlp", (1, 4), "zero-1", 4),
    Cell("mlp", (1, 2), "ddp", 1),
    Cell("mlp with loss", (2, 2), "auto", 1),
)


def test_the_sample_has_every_plan_model_and_mesh() -> None:
    assert {cell.plan for cell in SAMPLE} == set(PLANS)
    assert {cell.model for cell in SAMPLE} == {*MODELS, "mlp with loss"}
    assert {cell.shape for cell in SAMPLE} == set(SHAPES)
    assert {cell.microbatches for cell in SAMPLE} == {1, 4}
    assert len(cells()) == len(set(cells())) == 3 * 3 * 7 * 2


@pytest.mark.parametrize("model", [m for m in MODELS if m != "mlp"])
def test_labels_are_ignored_unevenly(model: str) -> None:
    """Otherwise a mean over the rows of one rank would pass for the mean over all."""
    ignored = (CASES[model].batch(0)["labels"] == -100).sum(1)
    assert ignored.max() == CASES[model].batch(0)["labels"].shape[1]
    for n_parts in (2, 4, 16):
        assert len(set(ignored.view(n_parts, -1).sum(1).tolist())) > 1


@pytest.mark.parametrize("model", CASES)
def test_the_reference_learns(model: str) -> None:
    """A gradient of zeros everywhere would agree with anything."""
    trained = reference(model)
    assert len(set(trained.losses)) == len(trained.losses)
    moving = [bool(g.abs().max() > 1e-6) for g in trained.gradients.values()]
    assert sum(moving) > len(moving) / 2


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_parity(cell: Cell, workers: Callable[[int], WorkerPool]) -> None:
    assert wrong(cell, workers(cell.n_ranks)) == {}
