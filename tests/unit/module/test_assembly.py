"""Rows of a dataset become the part of a batch that a rank reads."""

from __future__ import annotations

import torch
from torch.utils.data import default_collate

from autopar.module.batches.assembly import Assembly, Part, Task


def test_a_rank_reads_the_rows_that_each_input_needs() -> None:
    rows = [{name: torch.tensor([i]) for name in "xyz"} for i in range(8)]
    part = Part((2, 7), {"x": (2, 4), "y": (5, 7), "z": None}, dict.fromkeys("xyz", (1,)))
    task = Task((7, 6, 5, 4, 3, 2, 1, 0), (0, 0), 0, part=part)
    batch, is_part = Assembly(rows, default_collate, None)[task]
    assert is_part
    assert {name: value.flatten().tolist() for name, value in batch.items()} == {
        "x": [5, 4],
        "y": [2, 1],
    }
