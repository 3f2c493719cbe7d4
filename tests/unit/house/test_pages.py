"""Pages print what they show (`tests/helpers/pages.py`), and their commands parse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.nightly import nightly
from tests.helpers.pages import (
    ROOT,
    USAGE_ERROR,
    blocks_of,
    check_command,
    commands_of,
    examples_of,
    is_shown,
    run,
    update,
)

PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "made"),
]
# The README's snippet is pasted (`test_docs.py`).
RUN = [p for p in PAGES[1:] if any(b.kind in ("python", "console") for b in blocks_of(p))]
# They plan or train for seconds.
SLOW = "calibrate config constrain index megatron plan precision read_a_plan train".split()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def alone(registry: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for a page, whose rules, random numbers and process group end with it."""
    monkeypatch.setenv("AUTOPAR_CODE_DIR", str(tmp_path / "code"))
    folder = tmp_path / "page"
    folder.mkdir()
    with torch.random.fork_rng():
        yield folder
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=nightly) if p.stem in SLOW else p for p in RUN], ids=name_of
)
def test_a_page_prints_what_it_shows(page: Path, alone: Path) -> None:
    for shown in run(page, alone):
        where = f"{page}:{shown.block.line}"
        assert shown.is_right, f"{where} shows\n{shown.expected}\nprinted was\n{shown.printed}"


def test_every_tutorial_is_run() -> None:
    tutorials = {p for p in PAGES if p.parent.name == "tutorials"}
    assert len(tutorials) >= 10
    assert tutorials <= set(RUN)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse_and_examples_exist(page: Path) -> None:
    for command in commands_of(page):
        check_command(command)
    assert [path for path in examples_of(page) if not path.exists()] == []


def test_commands_are_found_in_pages() -> None:
    assert len(commands_of(ROOT / "README.md")) == 5
    found = commands_of(ROOT / "docs" / "resilient.md")
    assert found == ["plan my.models:factory --mesh ${n}x8 -o plans/${n}x8.json"]
    assert len(examples_of(ROOT / "docs" / "resilient.md")) == 1


@pytest.mark.parametrize("command", ["plan MODEL --meshes 1x4", "cost all_reduce --ranks four"])
def test_a_wrong_command_is_refused(command: str) -> None:
    with pytest.raises(USAGE_ERROR):
        check_command(command)


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(AssertionError, match="no command plans"):
        check_command("plans MODEL")


@pytest.mark.parametrize(
    ("expected", "is_right"),
    [
        ("a\nb\nc\n", True),
        ("a\n  b\n\nc\n", True),  # space is not compared
        ("a\nb\n", False),
        ("a\nc\n", False),
        ("a\n...\nc\n", True),
        ("...\nb\n...\n", True),
        ("...\nc\n", True),
        ("...\nb\n", False),
        ("b\n...\n", False),
        ("...\nc\n...\nb\n...\n", False),
        ("a\nb\nc\nd\n", False),
        ("", False),
        ("...\n", True),
    ],
)
def test_what_counts_as_shown(expected: str, is_right: bool) -> None:
    assert is_shown(expected, "a\nb\nc\n") is is_right


def test_rounding_errors_are_another_machines() -> None:
    assert is_shown("error 1.1e-16\n", "error 0.0e+00\n")
    assert not is_shown("error 1.1e-10\n", "error 0.0e+00\n")


def test_a_page_is_updated_and_checked(alone: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    directive = "```{literalinclude} x.py\n:pyobject: f\n```\n"
    block = "```python\nprint(1 + 1)\n```\n\n```text\n{}```\n"
    page.write_text(f"# Sums\n\n{directive}\n{block.format('3' + chr(10))}")
    assert [b.kind for b in blocks_of(page)] == ["{literalinclude} x.py", "python", "text"]
    assert not all(shown.is_right for shown in run(page, alone))
    update(page)
    assert page.read_text() == f"# Sums\n\n{directive}\n{block.format('2' + chr(10))}"
    page.write_text(page.read_text() + "\n```python\nprint('more')\n```\n")
    with pytest.raises(AssertionError, match="does not show more"):
        list(run(page, alone))
