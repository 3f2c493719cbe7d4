"""Documents: made pages are not stale; links and named files exist; the README can be pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import blocks_of, is_shown
from tests.rules import page as rules_page

ROOT = Path(__file__).parents[3]
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# Files named in print, by their whole path from the root.
_FILE = re.compile(r"\b(?:[a-z_]+/)+[\w.-]+\.(?:py|md|toml|json)\b")
# CHANGELOG.md names files by what they were called; the gallery is made.
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if page.name != "CHANGELOG.md" and page.parent.name != "made"
)
# All rooms but the package itself, whose modules are in ARCHITECTURE.md.
ROOMS = sorted(
    door.parent.relative_to(ROOT).as_posix()
    for wing in ("autopar", "passes", "cost", "runtime")
    for door in (ROOT / wing).glob("*/**/__init__.py")
    if not any((ROOT / "autopar" / link) in door.parents for link in ("passes", "cost", "runtime"))
)


def test_the_rules_in_print_are_the_rules() -> None:
    assert rules_page.PAGE.read_text() == rules_page.page(), "docs/rules.md is stale: run make docs"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_that_are_named_exist(page: str) -> None:
    folder, text = (ROOT / page).parent, (ROOT / page).read_text()
    named = {folder / target for target in _LINK.findall(text)}
    named |= {ROOT / name for name in _FILE.findall(_LINK.sub("", text))}
    assert [path for path in sorted(named) if not path.exists()] == []


def test_the_readme_snippet_runs_as_it_is_pasted(tmp_path: Path) -> None:
    """Into an interactive Python, where a blank line ends a block. It prints what is shown."""
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 200
    source = next(block.body for block in blocks_of(readme) if block.kind == "python")
    ran = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=f'{source}print(plan.code()["stage_0.py"])\n',
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Error" not in ran.stderr, ran.stderr
    assert "\nalso " in ran.stdout
    steps = [line for line in ran.stdout.splitlines() if re.match(r"step \d:", line)]
    losses = [float(line.split()[-1]) for line in steps]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    shown = [block.body for block in blocks_of(readme) if block.kind == "text"]
    assert len(shown) == 2
    assert [text for text in shown if not is_shown(f"...\n{text}", ran.stdout)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_its_files(room: str) -> None:
    """In its reading order, as `file.py` or as `file`."""
    folder = ROOT / room
    order = (folder / "__init__.py").read_text().split('"""')[1]
    stems = sorted(path.stem for path in folder.glob("*.py") if path.name != "__init__.py")
    assert [name for name in stems if not re.search(rf"[`\s]{name}(\.py)?[`\s]", order)] == []


def test_the_map_fits_on_its_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 200
