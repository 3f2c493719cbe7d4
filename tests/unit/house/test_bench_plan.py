"""What `make bench-plan` prints, of one small case and without a look at the clock."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from examples import bench_plan
from examples.bench_plan import (
    CASES,
    DEPTHS,
    Case,
    Phases,
    depths_text,
    llama,
    measure,
    table_of,
)
from examples.joint_plan import LLAMA_3_8B


@pytest.fixture
def small_case(monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = {**LLAMA_3_8B, "num_hidden_layers": 4}
    case = Case(lambda: llama(sizes, 16), (1, 4), "a100-80gb", 1.0)
    monkeypatch.setitem(CASES, "small", case)
    return "small"


def test_a_case_is_planned_and_shown(small_case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that held more before this test would hide what planning holds.
    held_bytes = chain([2 * 2**30], repeat(3 * 2**30))
    monkeypatch.setattr(bench_plan, "_most_held_bytes", lambda: next(held_bytes))
    row = measure(small_case)
    assert row.n_considered > 5
    assert row.objective_s > 0 and row.gap < 0.01
    assert {"analysis", "planning"} <= row.phases_s.keys()
    assert sum(row.phases_s.values()) <= row.plan_s * 1.01
    stats = row.stats
    assert stats.n_written_out > stats.n_variables > 0
    assert stats.n_solved > 5
    assert (row.peak_bytes, row.memory_bytes) == (3 * 2**30, 2**30) and row.wall_s > 0
    console = Console(width=260, record=True, file=io.StringIO())
    console.print(table_of([row]))
    text = console.export_text()
    assert row.chosen in text and small_case in text
    assert f"{stats.n_written_out} -> {stats.n_variables}" in text
    assert depths_text([row]) is None
    rows = [replace(row, name=name, plan_s=s) for name, s in zip(DEPTHS, (2.0, 5.0), strict=True)]
    assert depths_text(rows) == "8 -> 80 layers: 2.50 times the seconds, the target is 1.5"


def test_every_case_has_a_model() -> None:
    """The smallest of each family is built, on meta."""
    for name in ("vit-22b-8x8", "t5-11b-8x8"):
        with torch.device("meta"):
            model, inputs, loss_fn = CASES[name].make()
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert all(t.device.type == "meta" for t in inputs.values())
        if loss_fn is not None:
            output = SimpleNamespace(last_hidden_state=torch.full((2, 3), 2.0))
            assert loss_fn(output, inputs) == 4.0


def test_phases_are_by_what_planning_says_it_does() -> None:
    phases = Phases()
    for text in ("planning search on dp=2", "planning several stages", "done"):
        phases(text)
    assert list(phases.spent_s) == ["analysis", "planning", "pipelines"]


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_plan.main(["no-such-case"])
    assert "llama-8b-1x8" in capsys.readouterr().err
