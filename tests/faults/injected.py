"""Faults injected into the source one by one: does a test of the first tier fail, and which?

    python -m tests.faults.injected              all of them: some twenty minutes on one core
    python -m tests.faults.injected 3 7          these
    python -m tests.faults.injected --nightly 3  beside the second tier

Each runs on a copy of the committed tree: first the tests that `injected.toml` names, then all,
until one fails. The faults were written before the tests were cut to two tiers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".toml")


def main(words: list[str]) -> int:
    """Prints a line per fault; the number of those that no test finds."""
    mark = "nightly" if "--nightly" in words else "not nightly and not gpu and not browser"
    faults = tomllib.loads(TABLE.read_text(encoding="utf-8"))["fault"]
    numbers = [int(w) for w in words if w.isdigit()] or list(range(len(faults)))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        for number in numbers:
            file, before, after = (faults[number][key] for key in ("file", "before", "after"))
            text = (tree / file).read_text(encoding="utf-8")
            assert text.count(before) == 1, f"{file} has changed: {before}"
            (tree / file).write_text(text.replace(before, after), encoding="utf-8")
            near = [f"tests/{name}" for name in faults[number]["tests"]]
            finder = _first_failure(tree, near, mark) or _first_failure(tree, ["tests"], mark)
            missed += finder is None
            sys.stdout.write(f"{number:2} {file}: {finder or 'NOT FOUND'}\n")
            sys.stdout.flush()
            (tree / file).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(numbers) - missed} of {len(numbers)} found\n")
    return missed


def _first_failure(tree: Path, tests: list[str], mark: str) -> str | None:
    """The first test that fails or does not start; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout=3600", "-m", mark]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True
    )
    if run.returncode in (0, 5):  # passed, or none has the mark
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"pytest ended with {run.returncode}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
