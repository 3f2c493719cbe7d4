"""Documents: made pages are not stale; written ones print what they show and name real files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import app
from autopar.passes.pipeline import PASSES
from tests.rules import page as rules_page

ROOT = Path(__file__).parents[3]
CUSTOM_OPERATORS = ROOT / "docs" / "custom_operators.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Errors of rounding are another machine's to choose; 1e-12 is what `check_rule` allows.
_ROUNDING = re.compile(r"\b(?:0\.0e\+00|\d\.\de-(?:1[2-9]|[2-9]\d))\b")
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# Files named in print, by their whole path from the root.
_FILE = re.compile(r"\b(?:[a-z_]+/)+[\w.-]+\.(?:py|md|toml|json)\b")
# CHANGELOG.md names files by what they were called.
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if page.name != "CHANGELOG.md"
)


def test_the_rules_in_print_are_the_rules() -> None:
    assert rules_page.PAGE.read_text() == rules_page.page(), "docs/rules.md is stale: run make docs"


def test_custom_operators_prints_what_it_shows(registry: None) -> None:
    """Python blocks run in one namespace; a text block is what the blocks before it printed."""
    text = CUSTOM_OPERATORS.read_text()
    namespace: dict[str, object] = {"__name__": "custom_operators"}
    printed = io.StringIO()
    kinds = []
    for match in _BLOCK.finditer(text):
        kind, body = match.groups()
        kinds.append(kind)
        if kind == "text":
            assert rounded(printed.getvalue()) == rounded(body)
            printed = io.StringIO()
            continue
        # Blank lines keep the page's line numbers in tracebacks.
        source = "\n" * text.count("\n", 0, match.start(2)) + body
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(CUSTOM_OPERATORS), "exec"), namespace)
    assert not printed.getvalue()
    assert (kinds.count("python"), kinds.count("text")) == (7, 6)


def test_the_readme_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of the form `autopar ... demo:mlp ...`, run in `examples`, before their blocks."""
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    shown = re.findall(r"`autopar (\w+ demo:mlp [^`]*)`(.*?)(?=`autopar |^## )", text, re.M | re.S)
    for command, part in shown:
        result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        printed = re.sub(r"\(\S*/demo\.py", "(demo.py", result.output)
        blocks = re.findall(r"^```\w*\n(.*?)^```$", part, re.M | re.S)
        assert blocks and all(squeezed(block) in squeezed(printed) for block in blocks), command
    assert [command.split()[0] for command, _ in shown] == ["plan", "explain", "code"]


def squeezed(text: str) -> str:
    """Without what indents lines, and the space before comments."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def rounded(text: str) -> str:
    return _ROUNDING.sub("~0", text)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in _LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    named = sorted(set(_FILE.findall((ROOT / page).read_text())))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_first_snippet_runs_as_it_is_pasted(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    source = next(match[2] for match in _BLOCK.finditer(text) if match[1] == "python")
    (tmp_path / "train.py").write_text(source)
    ran = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_the_map_fits_on_its_page_and_lists_the_passes() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 200
    told = re.findall(r"^\| `([a-z-]+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert told == [(one.name(), one.provides[0].__name__) for one in PASSES]
