"""Parity on real processes: a fixed sample of the table that `make parity` runs whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.report import Division
from autopar.runtime.launch import WorkerPool
from tests.helpers import jobs
from tests.helpers.jobs import PLANS, AnyCell, Batch, Cell, train_alone
from tests.helpers.nightly import nightly, one_in
from tests.helpers.pipeline_jobs import LAYOUTS, PipelineCell
from tests.parity.table import Verdict, by_family, chosen, off_by, verdict
from tests.parity.zoo import FAMILIES, entries
from tests.parity.zoo.cells import PLACES, ZooCell, shortfall

BY_DAY: tuple[AnyCell, ...] = (
    Cell("gpt2", (1, 2), "auto", 1),
    Cell("gpt2", (1, 2), "sequence", 4),
    Cell("gpt2", (1, 2), "zero-2", 4),
    Cell("mlp", (1, 4), "zero-1", 4),
    Cell("mlp with loss", (2, 2), "auto", 1),
    PipelineCell("mlp", "(1,1) + (1,3)", "gpipe", 8),
    PipelineCell("mlp", "no data", "1f1b", 4),
    PipelineCell("mlp", "pp2 dp2 zero-3", "gpipe", 4),
    ZooCell("attention-by-position", "1x2", "auto"),
    ZooCell("cross-attention", "1x2", "tensor"),
)
AT_NIGHT: tuple[AnyCell, ...] = (
    Cell("gpt2", (2, 2), "megatron", 4),
    Cell("gpt2", (2, 2), "auto", 4),
    Cell("llama", (1, 2), "zero-2", 4),
    Cell("llama", (1, 2), "zero-3", 4),
    Cell("llama", (1, 4), "megatron", 1),
    Cell("llama", (2, 2), "sequence", 1),
    Cell("mlp", (1, 2), "ddp", 1),
    PipelineCell("mlp", "2 x (1,2)", "1f1b", 8),
    PipelineCell("gpt2", "4 x (1,1)", "1f1b", 8),
    PipelineCell("gpt2", "pp2 tp2 sequence", "1f1b", 4),
    PipelineCell("llama", "2 x (2,1) as given", "gpipe", 4),
    PipelineCell("t5", "pp2 dp2 zero-2", "1f1b", 4),
    ZooCell("attention-by-position", "1x4", "auto"),
    ZooCell("cross-attention", "2x2", "tensor"),
    ZooCell("resnet", "1x2", "tensor"),
    ZooCell("mixtral", "1x2", "zero3"),
    ZooCell("bert-classifier", "2x2", "tensor"),
    ZooCell("distilbert", "2-stages", "tensor"),
    ZooCell("encoder-dropout", "2-stages", "auto"),
    ZooCell("decoder", "2-stages", "zero3"),
)
SAMPLE = (*BY_DAY, *AT_NIGHT)


@one_in(3)
@pytest.mark.parametrize(
    "cell", [*BY_DAY, *(pytest.param(cell, marks=nightly) for cell in AT_NIGHT)], ids=str
)
def test_parity(cell: AnyCell, workers: Callable[[int], WorkerPool]) -> None:
    result = verdict(cell, workers(cell.n_ranks))
    assert result.kind == "passed", str(result)
    # A gradient of zeros everywhere would agree with anything.
    alone = train_alone(cell.case)
    assert len(set(alone.losses)) == len(alone.losses)
    moving = [bool(g.abs().max() > 1e-6) for g in alone.gradients.values()]
    assert sum(moving) > len(moving) / 2


def test_the_table_and_the_sample() -> None:
    table = chosen(())
    assert len(table) == len(set(table))
    assert {cell for cell in SAMPLE if isinstance(cell, ZooCell)} <= set(table)
    assert {cell.plan for cell in SAMPLE if isinstance(cell, Cell)} == set(PLANS)
    assert {cell.place for cell in SAMPLE if isinstance(cell, ZooCell)} == set(PLACES)
    assert {cell.layout for cell in table if isinstance(cell, PipelineCell)} == set(LAYOUTS)
    assert {cell.family for cell in table if isinstance(cell, ZooCell)} == set(FAMILIES)


@pytest.mark.parametrize("draw", [jobs.tokens, entries.tokens, entries.next_tokens])
def test_labels_are_ignored_unevenly(draw: Callable[[int], Batch]) -> None:
    """Otherwise a mean over the rows of one rank would pass for the mean over all."""
    labels = draw(0)["labels"]
    ignored = (labels == entries.IGNORED).sum(1)
    assert ignored.max() == labels.shape[1]
    for n_parts in (2, 4, len(labels)):
        assert len(set(ignored.view(n_parts, -1).sum(1).tolist())) > 1


def test_plans_that_repeat_work_fail() -> None:
    whole = Division(stored=0.0, products=1.0, by_weights=0.0)
    assert shortfall("auto", whole) is None
    assert shortfall("tensor", whole) == "only 0% of the FLOPs go through sharded weights"
    assert shortfall("tensor", replace(whole, by_weights=0.8)) is None
    repeated = replace(whole, products=0.5)
    assert shortfall("zero3", repeated) == "only 50% of the matmul FLOPs are sharded"


def test_verdicts() -> None:
    cell = ZooCell("resnet", "1x2", "tensor")
    passed, failed = Verdict(cell, 0.0, None, 1.0), Verdict(cell, 1.0, "off", 1.0)
    assert (passed.kind, failed.kind) == ("passed", "failed")
    assert [line.split(None, 1) for line in by_family([passed, failed])] == [
        ["resnet", "1 failed, 1 passed"]
    ]
    assert off_by({"a": 1e-12, "b": 1e-16}) is None
    assert off_by({"a": 1e-3, "b": 1.0, "c": 0.0}) == "b: 1.0e+00, a: 1.0e-03"
    assert off_by({"a": float("nan")}) == "a: nan"
