"""Docstrings of this house as reStructuredText, for Sphinx.

Two of their forms mean something else there:

    `name`   text          a table: words and their meaning, at least two spaces apart; lines that
                           continue a meaning begin in its column
    pm.step(**batch)       code: a block that is indented, after a blank line

A table becomes a definition list, code a literal block. Code between single backticks is Sphinx's
business (`default_role`), but a letter after it (`Spec`s) must be marked. Nothing here imports
Sphinx.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PLURAL = re.compile(r"(?<!`)(`[^`]+`)(?=\w)")
_ROW = re.compile(r"(?P<words>\S+(?: \S+)*)(?P<gap> {2,})(?=\S)")


def for_autodoc(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Sphinx's `autodoc-process-docstring`: changes `lines` in place."""
    lines[:] = restructured(lines)


def restructured(lines: list[str]) -> list[str]:
    """The lines of a docstring, dedented, as lines of reStructuredText."""
    found: list[str] = []
    for block in blocks(lines):
        if not is_indented(block):
            found += table(block) if is_table(block) else plain(block)
        elif is_table(dedented(block)):
            found += table(dedented(block))
        else:
            found += ["::", "", *(f"    {line.removeprefix('    ')}" for line in block)]
        found.append("")
    return found


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines without a blank one; code keeps its blank lines.

    A table is apart from text that stands before or after it without a blank line.
    """
    block: list[str] = []
    for line in [*lines, ""]:
        starts_table = bool(_ROW.match(line)) and not any(map(_ROW.match, block))
        ends_table = bool(block) and is_table(block) and line[:1].strip() and not _ROW.match(line)
        if block and (not line.strip() or starts_table or ends_table):
            yield block
            block = []
        if line.strip():
            block.append(line.rstrip())


def plain(block: list[str]) -> list[str]:
    return [_PLURAL.sub(r"\1\\ ", line) for line in block]


def is_indented(block: list[str]) -> bool:
    return all(line.startswith(" ") for line in block)


def dedented(block: list[str]) -> list[str]:
    indent = min(len(line) - len(line.lstrip()) for line in block)
    return [line[indent:] for line in block]


def is_table(block: list[str]) -> bool:
    """Does every line begin a row, or continue one in its column?"""
    column = 0
    for line in block:
        row = _ROW.match(line)
        if row is not None:
            column = row.end()
        elif not column or line[:1].strip():
            return False
    return bool(block)


def table(block: list[str]) -> list[str]:
    """A definition list of the rows."""
    found: list[str] = []
    for line in block:
        row = _ROW.match(line)
        if row is not None:
            words = row["words"].replace("`", "")
            found += ["", f"``{words}``", *plain([f"    {line[row.end() :]}"])]
        else:
            found += plain([f"    {line.strip()}"])
    return found
