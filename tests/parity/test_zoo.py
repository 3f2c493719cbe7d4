"""The zoo of models: checks of its entries and cells, and a fixed sample of its parity cells.

`make parity` runs all cells. A cell also fails if its plan repeats work on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from autopar.report import Division
from autopar.runtime.launch import WorkerPool
from tests.helpers.jobs import Batch, Mlp, rows
from tests.parity.table import Verdict, by_family, off_by
from tests.parity.zoo import FAMILIES
from tests.parity.zoo.cells import PLACES, ZooCell, run, shortfall, zoo_cells
from tests.parity.zoo.entries import (
    IGNORED,
    PLANS,
    ROWS,
    SEQUENCE,
    Entry,
    config,
    next_tokens,
    padded,
    tokens,
)

SAMPLE = (
    ZooCell("resnet", "1x2", "tensor"),
    ZooCell("mixtral", "1x2", "zero3"),
    ZooCell("attention-by-position", "1x4", "auto"),
    ZooCell("cross-attention", "2x2", "tensor"),
    ZooCell("bert-classifier", "2x2", "tensor"),
    ZooCell("distilbert", "2-stages", "tensor"),
    ZooCell("encoder-dropout", "2-stages", "auto"),
    ZooCell("decoder", "2-stages", "zero3"),
)
NO_SUM = Entry(Mlp, lambda seed: rows(seed, "x"), microbatches=1, why="for a test")


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_parity(cell: ZooCell, workers: Callable[[int], WorkerPool]) -> None:
    outcome = run(cell, workers(cell.n_ranks))
    assert off_by(outcome.errors) is None
    assert outcome.lacks is None, outcome.shown


def test_the_table_and_the_sample() -> None:
    table = zoo_cells()
    assert len(table) == len(set(table))
    assert {cell.family for cell in table} == set(FAMILIES)
    for entry in FAMILIES.values():
        assert set(entry.plans) <= set(PLANS)
    assert set(SAMPLE) <= set(table)
    assert {cell.place for cell in SAMPLE} == set(PLACES)
    assert {cell.plan for cell in SAMPLE} == set(PLANS)
    assert len({cell.family for cell in SAMPLE}) == len(SAMPLE)


def test_reasons_are_of_cells() -> None:
    """Every listed reason is that of some cell, so none is left over."""
    names = [set(str(cell).split()) for cell in zoo_cells()]
    for family, entry in FAMILIES.items():
        for words in entry.listed:
            assert any({family, *words.split()} <= name for name in names), (family, words)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_some_families_drop(family: str) -> None:
    """In all families but those named "-dropout", every dropout probability is 0."""
    model = FAMILIES[family].case.model()
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert any(drops) == family.endswith("-dropout")


def test_configurations_in_others_do_not_drop() -> None:
    found = config("clip", text_config={"attention_dropout": 0.5}, vision_config={"dropout": 0.5})
    assert found.text_config.attention_dropout == found.vision_config.dropout == 0.0


@pytest.mark.parametrize("draw", [tokens, next_tokens], ids=("same", "next"))
def test_labels_are_ignored_unevenly(draw: Callable[[int], Batch]) -> None:
    """Otherwise a mean over the rows of one rank would pass for the mean over all."""
    ignored = (draw(0)["labels"] == IGNORED).sum(1)
    assert ignored[0] == ignored.max() == SEQUENCE
    for n_parts in (2, 4, ROWS):
        assert len(set(ignored.view(n_parts, -1).sum(1).tolist())) > 1


def test_rows_are_padded_unevenly() -> None:
    lengths = padded(0)["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) == 3


def test_plans_that_repeat_work_fail() -> None:
    whole = Division(stored=0.0, products=1.0, by_weights=0.0)
    assert shortfall("auto", whole) is None
    assert shortfall("tensor", whole) == "only 0% of the FLOPs go through sharded weights"
    assert shortfall("tensor", replace(whole, by_weights=0.8)) is None
    repeated = replace(whole, products=0.5)
    assert shortfall("zero3", repeated) == "only 50% of the matmul FLOPs are sharded"


def test_listed_cells() -> None:
    """A reason is for cells whose text has all its words. A listed cell that passes has failed."""
    entry = replace(NO_SUM, listed={"2-stages zero3": "not yet"})
    assert entry.reason("zoo x 2-stages zero3") == "not yet"
    assert entry.reason("zoo x 1x2 zero3") is None
    cell = SAMPLE[0]
    assert Verdict(cell, 0.0, None, 1.0).kind == "passed"
    assert Verdict(cell, 1.0, "off", 1.0).kind == "failed"
    assert Verdict(cell, 1.0, "off", 1.0, listed="not yet").kind == "listed"
    wrongly = Verdict(cell, 0.0, None, 1.0, listed="not yet")
    assert wrongly.kind == "failed"
    assert "passes, but is listed: not yet" in str(wrongly)


def test_summary_by_family() -> None:
    cell = SAMPLE[0]
    found = [Verdict(cell, 0.0, None, 1.0), Verdict(cell, 1.0, "off", 1.0)]
    assert [line.split(None, 1) for line in by_family(found)] == [["resnet", "1 failed, 1 passed"]]


def test_the_worst_errors_are_told() -> None:
    assert off_by({"a": 1e-12, "b": 1e-16}) is None
    assert off_by({"a": 1e-3, "b": 1.0, "c": 0.0}) == "b: 1.0e+00, a: 1.0e-03"
    assert off_by({"a": float("nan")}) == "a: nan"
