"""Fixtures and settings that every test shares."""

from __future__ import annotations

import difflib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import hypothesis
import pytest

from tests.helpers.distribution import PoolsTogether, turn
from tests.helpers.nightly import deal_cases

# Ranks share few cores, so each has one thread. This must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Wall time is never asserted, so examples have no deadline. Every run draws the same examples, so
# a failure comes from the change under test. `--hypothesis-profile=explore` draws new examples.
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "autopar", hypothesis.settings.get_profile("explore"), derandomize=True
)
hypothesis.settings.load_profile("autopar")

# Modules and captured models live to the end of the run, so frequent collections find no garbage.
gc.set_threshold(10_000, 20, 20)

if TYPE_CHECKING:
    from autopar.runtime.launch import WorkerPool

GOLDEN_DIR = Path(__file__).parent / "golden"


class Golden(Protocol):
    """Compares `text` with the whole file `tests/golden/<name>`."""

    def __call__(self, name: str, text: str) -> None: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden with what tests produce"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of which the run leaves all tests out are not imported."""
    folder = collection_path.name
    return (
        True if folder in ("browser", "gpu") and f"not {folder}" in config.option.markexpr else None
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is left to the night. Sort tests by the `turn` of their file; the order within a
    turn stays."""
    deal_cases(items)
    items.sort(key=lambda item: turn(item.path))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> PoolsTogether | None:
    """Distribute files by `PoolsTogether`.

    xdist's own order is off: it starts with the files of most tests, not with the slowest files.
    """
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return PoolsTogether(config, log)


@pytest.fixture
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sees no overlap: its objective is a sum, and an optimum is exact."""
    from autopar.passes.intra.hiding import NOTHING_HIDDEN, Hiding

    monkeypatch.setattr(Hiding, "of", staticmethod(lambda slowdown, share: NOTHING_HIDDEN))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Fails with a unified diff if `text` is not the golden file; the update flag rewrites it."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        compare_golden(GOLDEN_DIR / name, text, update=update)

    return compare


@pytest.fixture
def registry() -> Iterator[None]:
    """Forget the rules that a test registers when it ends."""
    from autopar.rules.functions import _registered
    from autopar.rules.registry import _registry

    before = dict(_registry)
    yield
    _registry.clear()
    _registry.update(before)
    _registered.clear()


@pytest.fixture(scope="session", autouse=True)
def captured_once() -> None:
    """Share captures between tests; a run that has not imported torch stays without it."""
    if "torch" in sys.modules:
        from tests.helpers.captures import share_captures

        share_captures()


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], WorkerPool]]:
    """Number of ranks -> a pool of that many worker processes; they start once for all tests."""
    from tests.helpers.pools import Shared

    with pytest.MonkeyPatch.context() as patch:
        # Workers inherit the variable, so generated programs stay out of the user's cache.
        patch.setenv("AUTOPAR_CODE_DIR", str(tmp_path_factory.mktemp("code")))
        # The pool is not closed: in an orderly exit a worker takes seconds to free its memory.
        # Without its pool it is killed. `test_runtime_launch.py` tests how workers end.
        yield Shared().first


def compare_golden(path: Path, text: str, *, update: bool) -> None:
    """The check behind `golden`: it compares bytes of the whole file, so line endings count too."""
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
