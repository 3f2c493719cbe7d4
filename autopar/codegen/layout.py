"""Lays out the statements of a file in few lines that say the same.

    a view                 is written where it is read, if only one kernel right after reads it
    a kernel               is written into the view of its result, if nothing else reads that
    what a line frees      stands beside it, where there is room
    collectives of one     share a `with phase(...)`
    phase

No kernel changes its place. Views allocate nothing, so every value ends where it did.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.codegen.blocks import WORDS, Statement, del_row, is_comment
from autopar.codegen.words import LINE_LENGTH, commented

# Code of a statement with a view in it, by the names of its block's function; and with its frees.
_WIDTH, _WIDTH_WITH_FREES = 120, 160


def with_views_inside(statements: Sequence[Statement]) -> list[Statement]:
    """The statements, with what only the next kernel reads written into it."""
    found: list[Statement] = []
    inside: set[str] = set()
    for k, s in enumerate(statements):
        found.append(s)
        ended = statements[k + 1].frees if k + 1 < len(statements) else ()
        for name in s.reads:
            at = _maker(found, name) if name in ended else None
            if at is not None and _write_inside(found, at, name):
                inside.add(name)
        if s.frees:
            _merge_frees(found, inside)
    return found


def _maker(found: Sequence[Statement], name: str) -> int | None:
    """Where a value is made that can be written into the last statement.

    Views may stand between the two, which allocate nothing; and what the maker of a view frees.
    """
    last, k = found[-1], len(found) - 2
    if k > 0 and found[k].frees and (last.is_view or _hands_over(last)):
        k -= 1
    near = k
    while k >= 0 and name not in found[k].writes:
        if not found[k].is_view or name in found[k].reads or _head(found[k]):
            return None
        k -= 1
    if k < 0 or found[k].writes != (name,):
        return None
    if _hands_over(last):
        return k if k == near and ".wait()" in found[k].rows[-1] else None
    is_plain = found[k].work == last.work == "compute" and "phase(" not in found[k].rows[0]
    return k if is_plain and (found[k].is_view or (last.is_view and k == near)) else None


def _write_inside(found: list[Statement], at: int, name: str) -> bool:
    """Write the value of statement `at` into the last one, if that is easy to read."""
    maker, last = found[at], found[-1]
    if _head(last) or len(last.rows) != 1:
        return False
    start = f"    {name} = "
    value, _, type_of = maker.rows[-1].partition("  # ")
    inner = value.strip()[len(start) - 4 :]
    code, mark, comment = last.rows[0].partition("  # ")
    left, equals, right = ("", "", code) if _hands_over(last) else code.partition(" = ")
    words = WORDS.split(right)
    n_reads = words[1::2].count(name)
    text = "".join(inner if word == name else word for word in words)
    new = f"{left}{equals}{text.rstrip()}"
    block = last.block or maker.block or ""
    if n_reads != 1 or not value.startswith(start) or _width(new, block) > _WIDTH:
        return False
    if _hands_over(last):
        comment = f"{type_of}  {comment}"
    reads = tuple(n for n in dict.fromkeys((*maker.reads, *last.reads)) if n != name)
    region = None if maker.region is None else last.region
    row = commented(new, comment) if mark else new
    found[-1] = last._replace(rows=(row,), reads=reads, region=region)
    if _hands_over(last):
        found[-1] = found[-1]._replace(work=maker.work, block=maker.block, follows=maker.follows)
    after = at + 1 if not found[at + 1].frees else len(found) - 1
    if _head(maker):
        rows = (*_head(maker), *found[after].rows)
        own = found[after].block or maker.block
        found[after] = found[after]._replace(rows=rows, block=own)
    if found[-2].frees:
        found[-2:] = [found[-1], found[-2]]
    del found[at]
    return True


def _width(code: str, block: str) -> int:
    """How wide a row is, in equal blocks alike: names differ in their numbers."""
    return len(
        re.sub(r"_\d+", "", code.replace(f"{block.replace('.', '_')}_", "") if block else code)
    )


def _hands_over(s: Statement) -> bool:
    return s.rows[-1:] != () and s.rows[-1].startswith("    ready(")


def _head(s: Statement) -> tuple[str, ...]:
    """The comment over a statement."""
    n = next((n for n, row in enumerate(s.rows) if row and not is_comment(row)), len(s.rows))
    return s.rows[:n]


def _merge_frees(found: list[Statement], inside: set[str]) -> None:
    """Make the frees at the end one, without names that are no variables."""
    names: tuple[str, ...] = ()
    last = found[-1]
    while found and found[-1].frees:
        names = (*found.pop().frees, *names)
    kept = tuple(name for name in names if name not in inside)
    inside.difference_update(names)
    if kept:
        found.append(last._replace(rows=(del_row(kept),), reads=kept, frees=kept))


def joined(lines: Sequence[str]) -> list[str]:
    """The lines of a file; frees stand beside statements, neighbours share their phase."""
    found: list[str] = []
    phase = ""
    for line in _with_short_lists(lines):
        if phase and line == phase:
            continue
        indent = _indent(line)
        is_free = line.lstrip().startswith("del ") or line.endswith(".clear()")
        if is_free and phase and indent < 8:
            line, indent = f"    {line}", 8
        if line.startswith("    with phase("):
            phase = line
        elif indent < 8 and line:
            phase = ""
        before = found[-1] if found else ""
        code, mark, comment = before.partition("  # ")
        beside = f"{code.rstrip()}; {line.lstrip()}"
        if (
            is_free
            and _indent(before) == indent
            and _ends_statement(code)
            and len(beside) <= _WIDTH_WITH_FREES
        ):
            found[-1] = commented(beside, comment) if mark else beside
        else:
            found.append(line)
    return found


def _with_short_lists(lines: Sequence[str]) -> list[str]:
    """The lines; a list of names is on one line if it fits there by the names of its function."""
    found: list[str] = []
    start: int | None = None
    for line in lines:
        found.append(line)
        if line.strip() == "[":
            start = len(found) - 1
        elif line.strip() == "]," and start is not None:
            names = " ".join(row.strip() for row in found[start + 1 : -1]).rstrip(",")
            whole = f"{found[start]}{names}],"
            if len(whole) <= LINE_LENGTH:
                found[start:] = [whole]
            start = None
    return found


def _ends_statement(code: str) -> bool:
    text = code.strip()
    return " = " in text or text.startswith("ready(") or text == ")"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
