"""A fixed sample of random faults; `make faults` runs a thousand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.nightly import nightly

N_RUNS, SEED = 10, 5


@nightly
def test_ranks_that_fail(tmp_path: Path) -> None:
    """In a process of its own, which forks: that takes one without threads."""
    out = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "tests.faults.kills", "--runs", str(N_RUNS)]
    done = subprocess.run(
        [*command, "--seed", str(SEED), "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(runs) == N_RUNS and sum(run["fired"] for run in runs) >= N_RUNS - 2
    assert {run["run"]["launcher"] for run in runs} == {"launch", "torchrun"}
