"""Fixtures and settings that every test shares."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Protocol

import hypothesis
import pytest

# Ranks share few cores: one thread each. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Wall time is never asserted, so no example has a deadline.
hypothesis.settings.register_profile("autopar", deadline=None, print_blob=True)
hypothesis.settings.load_profile("autopar")

GOLDEN_DIR = Path(__file__).parent / "golden"


class Golden(Protocol):
    """Compares `text` with the whole file `tests/golden/<name>`."""

    def __call__(self, name: str, text: str) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden with what tests produce"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Fails with a unified diff where `text` is not the golden file, or rewrites the file."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        compare_golden(GOLDEN_DIR / name, text, update=update)

    return compare


def compare_golden(path: Path, text: str, *, update: bool) -> None:
    """The check behind `golden`: bytes of the whole file, so line ends count too."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return
    how = "read the difference, then run `make golden` if it is meant"
    if not path.exists():
        pytest.fail(f"no golden file {path.name}; {how}\n\n{text}", pytrace=False)
    expected = path.read_bytes().decode()
    if expected == text:
        return
    diff = difflib.unified_diff(
        expected.splitlines(keepends=True),
        text.splitlines(keepends=True),
        f"golden/{path.name}",
        "this run",
    )
    shown = "".join(line if line.endswith("\n") else f"{line}\n\\ no newline\n" for line in diff)
    pytest.fail(f"{path.name} is not what it was; {how}\n\n{shown}", pytrace=False)
