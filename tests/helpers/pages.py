"""Documents whose blocks are run: the README, and every page of `docs`.

    ```python    is run, in one namespace for the page
    ```text      is what the Python blocks since the last such block printed
    ```console   lines that begin with `$ autopar` are run; what follows one is what it prints
    ```sh, ```   is not run; but commands of autopar must parse, and examples must exist

In what is printed, a line `...` stands for lines that are left out. Numbers below 1e-11 are
rounding errors, which another machine chooses. Commands run in a folder of the page's own that has
`examples/demo.py`.

`python -m tests.helpers.pages PAGE.md ...` writes what blocks print into pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer
from typer.testing import CliRunner

from autopar.cli import app

ROOT = Path(__file__).parents[2]
# Errors of rounding are another machine's to choose; 1e-12 is what `check_rule` allows.
_ROUNDING = re.compile(r"\b(?:0\.0e\+00|\d\.\de-(?:1[2-9]|[2-9]\d))\b")
_BLOCK = re.compile(r"^(?P<fence>```+)(?P<kind>[^`\n]*)\n(?P<body>.*?)^(?P=fence)$", re.M | re.S)
_COMMAND = re.compile(r'(?:^|[;&|] *|do )autopar ([a-z]+(?:"[^"\n]*"|[^;&|#"\n])*)', re.M)
_NOTE = re.compile(r" {3,}\S.*")  # beside a command, what it does
_EXAMPLE = re.compile(r"\bexamples(?:/\w+\.py|\.\w+)\b")
USAGE_ERROR = typer.BadParameter.__mro__[1]  # of the click that typer brings


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where the text begins in the page, and its line."""

    kind: str
    body: str
    start: int
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page; the kind of a MyST directive is in braces."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["kind"], m["body"], m.start("body"), text.count("\n", 0, m.start("body")))
        for m in _BLOCK.finditer(text)
    ]


@dataclass
class Shown:
    """What a page shows, and what was printed."""

    block: Block
    expected: str
    printed: str

    @property
    def is_right(self) -> bool:
        return is_shown(self.expected, self.printed)


def run(page: Path, folder: Path) -> Iterator[Shown]:
    """Run a page's blocks in `folder`; what each block shows beside what was printed."""
    namespace: dict[str, object] = {"__name__": page.stem, "__file__": str(page)}
    printed = io.StringIO()
    shutil.copy(ROOT / "examples" / "demo.py", folder)
    with contextlib.chdir(folder), _own_path():
        for block in blocks_of(page):
            if block.kind == "python":
                # Blank lines keep the page's line numbers in tracebacks.
                source = "\n" * block.line + block.body
                with contextlib.redirect_stdout(printed):
                    exec(compile(source, str(page), "exec"), namespace)
            elif block.kind == "text":
                yield Shown(block, block.body, printed.getvalue())
                printed = io.StringIO()
            elif block.kind == "console":
                yield from _console(block)
    assert not printed.getvalue().strip(), f"{page} does not show {printed.getvalue()}"


@contextlib.contextmanager
def _own_path() -> Iterator[None]:
    """Modules of the current folder are found, and forgotten afterwards."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
        sys.modules.pop("demo", None)


def _console(block: Block) -> Iterator[Shown]:
    for part in re.split(r"^\$ ", block.body, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        words = shlex.split(command)
        assert words[0] == "autopar", f"only commands of autopar are run, not {command}"
        result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"})
        assert result.exit_code == 0, f"{command}: {result.output}{result.exception or ''}"
        yield Shown(block, expected, re.sub(r"\(\S*/demo\.py", "(demo.py", result.stdout))


def is_shown(expected: str, printed: str) -> bool:
    """Whether all lines of `expected` were printed, in order, with nothing between them or around
    them except where a line `...` says so."""
    rest = squeezed(printed)
    parts = [squeezed(part) for part in re.split(r"^\.\.\.\n?", expected, flags=re.M)]
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        at = 0 if number == 0 else len(rest) - len(part) if is_last and part else _find(rest, part)
        if at < 0 or rest[at : at + len(part)] != part:
            return False
        rest = rest[at + len(part) :]
    return len(parts) > 1 or not rest


def _find(lines: list[str], part: list[str]) -> int:
    """Where `part` begins in `lines`; -1 if it does not."""
    places = range(len(lines) - len(part) + 1)
    return next((i for i in places if lines[i : i + len(part)] == part), -1)


def squeezed(text: str) -> list[str]:
    """Lines without rounding errors, empty lines, indentation and the space before comments."""
    lines = _ROUNDING.sub("~0", text).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def commands_of(page: Path) -> list[str]:
    """Commands of autopar in blocks that are not run, without the word `autopar`."""
    bodies = [b.body for b in blocks_of(page) if b.kind in ("sh", "")]
    return [_NOTE.sub("", m[1]).strip() for body in bodies for m in _COMMAND.finditer(body)]


def examples_of(page: Path) -> list[Path]:
    """Files of `examples` that blocks name, as paths or as modules."""
    bodies = [b.body for b in blocks_of(page) if b.kind in ("sh", "")]
    names = [m[0] for body in bodies for m in _EXAMPLE.finditer(body)]
    return [ROOT / (n if n.endswith(".py") else n.replace(".", "/") + ".py") for n in names]


def check_command(command: str) -> None:
    """Parse a command's words, and run nothing. Raises `USAGE_ERROR` for a wrong one."""
    name, *words = shlex.split(command)
    group = typer.main.get_command(app)
    with group.make_context("autopar", [name], resilient_parsing=True) as context:
        found = group.get_command(context, name)  # type: ignore[attr-defined]
        assert found is not None, f"there is no command {name}"
        if "--help" not in words:
            found.make_context(name, words, parent=context, resilient_parsing=False)


def update(page: Path) -> None:
    """Write what blocks print into the page, except where it leaves lines out rightly."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        found = list(run(page, Path(folder)))
    for shown in reversed(found):
        if shown.is_right:
            continue
        at = text.index(shown.expected, shown.block.start) if shown.expected else None
        if at is None:  # after the command, or in an empty block
            at = shown.block.start + len(shown.block.body)
        text = text[:at] + shown.printed.rstrip() + "\n" + text[at + len(shown.expected) :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        update(Path(name).absolute())
