"""What `make bench-plan` prints, of one small case and without a look at the clock."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from examples.bench_plan import CASES, DEPTHS, Case, depths_text, llama, measure, table_of
from examples.joint_plan import LLAMA_3_8B
from tests.helpers.nightly import nightly


@nightly
def test_a_case_is_planned_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**LLAMA_3_8B, "num_hidden_layers": 4}
    small = Case(lambda: llama(sizes, 16), (1, 4), "a100-80gb", 1.0)
    monkeypatch.setitem(CASES, "small", small)
    row = measure("small")
    assert row.n_considered > 5
    assert row.objective_s > 0 and row.gap < 0.01
    assert {"analysis", "planning"} <= row.phases_s.keys()
    assert sum(row.phases_s.values()) <= row.plan_s * 1.01
    stats = row.stats
    assert stats.n_written_out > stats.n_variables > 0
    assert stats.n_solved > 5
    assert row.peak_bytes >= row.memory_bytes >= 0 and row.wall_s > 0
    console = Console(width=260, record=True, file=io.StringIO())
    console.print(table_of([row]))
    text = console.export_text()
    assert row.chosen in text and "small" in text
    assert f"{stats.n_written_out} -> {stats.n_variables}" in text
    assert depths_text([row]) is None
    rows = [replace(row, name=name, plan_s=s) for name, s in zip(DEPTHS, (2.0, 5.0), strict=True)]
    assert depths_text(rows) == "8 -> 80 layers: 2.50 times the seconds, the target is 1.5"
