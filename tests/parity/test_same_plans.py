"""The comparison of plans between versions: it covers enough, and it notices a difference."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parity.same_plans import differences, every_case, write, zoo_plan
from tests.parity.zoo.cells import ZooCell


def test_it_has_cases_of_every_kind() -> None:
    names = list(every_case())
    assert len(names) >= 40
    for kind in ("zoo-", "llama-8-layers-", "bench-"):
        assert sum(name.startswith(kind) for name in names) >= 9


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    plan = zoo_plan(ZooCell("mixer", "1x2", "auto"))
    for folder in ("then", "now"):
        write(tmp_path / folder / "case", plan)
    assert differences(tmp_path / "then", tmp_path / "now") == []
    file = tmp_path / "now" / "case" / "plan.json"
    raw = json.loads(file.read_text())
    raw["objective_s"] *= 1 + 1e-12
    file.write_text(json.dumps(raw, indent=1) + "\n")
    (tmp_path / "now" / "case" / "stage_9.py").write_text("")
    assert differences(tmp_path / "then", tmp_path / "now") == ["case/plan.json", "case/stage_9.py"]
