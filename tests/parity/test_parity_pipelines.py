"""Parity of pipelines on real processes: a fixed sample of the table that `make parity` runs whole.

What is compared is said in `test_parallelize_parity.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import train_alone
from tests.helpers.pipeline_jobs import (
    CASES,
    LAYOUTS,
    PINNED,
    SEARCHED,
    PipelineCell,
    pipeline_cells,
)
from tests.parity.table import wrong

SAMPLE = (
    PipelineCell("mlp", "2 x (1,2)", "1f1b", 8),
    PipelineCell("mlp", "(1,1) + (1,3)", "gpipe", 8),
    PipelineCell("mlp", "no data", "1f1b", 4),
    PipelineCell("mlp", "pp2 dp2 zero-3", "gpipe", 4),
    PipelineCell("gpt2", "4 x (1,1)", "1f1b", 8),
    PipelineCell("gpt2", "pp2 tp2 sequence", "1f1b", 4),
    PipelineCell("llama", "2 x (2,1) as given", "gpipe", 4),
    PipelineCell("t5", "pp2 dp2 zero-2", "1f1b", 4),
)


def test_the_table_and_the_sample() -> None:
    """Every model has every layout; searched ones under both schedules and microbatch counts."""
    table = pipeline_cells()
    assert len(table) == len(set(table)) == 4 * 4 * 2 * 2 + 9 * 4
    for model in CASES:
        of_model = [c for c in table if c.model == model]
        assert {c.layout for c in of_model} == set(LAYOUTS)
        for layout in SEARCHED:
            ways = {(c.schedule, c.microbatches) for c in of_model if c.layout == layout}
            assert len(ways) == 4
    assert {c.model for c in SAMPLE} == set(CASES)
    assert {c.schedule for c in SAMPLE} == {"1f1b", "gpipe"}
    assert len({c.layout for c in SAMPLE}) == len(SAMPLE)


@pytest.mark.parametrize("model", CASES)
def test_the_reference_learns(model: str) -> None:
    """A gradient of zeros everywhere would agree with anything."""
    trained = train_alone(CASES[model])
    assert len(set(trained.losses)) == len(trained.losses)
    moving = [bool(g.abs().max() > 1e-6) for g in trained.gradients.values()]
    assert sum(moving) > len(moving) / 2


@pytest.mark.parametrize("model", CASES)
def test_pins_are_of_parameters(model: str) -> None:
    assert PINNED[model][0] in dict(CASES[model].model().named_parameters())


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_parity(cell: PipelineCell, workers: Callable[[int], WorkerPool]) -> None:
    assert wrong(cell, workers(cell.n_ranks)) == {}
