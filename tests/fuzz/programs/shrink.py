"""Makes a failing program small: one change at a time, kept if the fault stays of its kind.

A simpler layout; a statement deleted with all that reads it, or replaced by a value that it reads;
a term of the loss less; fewer copies of a block; a view less. Until nothing more can go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.programs.draw import runs
from tests.fuzz.programs.layouts import Layout
from tests.fuzz.programs.program import NAMES, Line, Program, Scope, renamed

Case = tuple[Program, Layout]
_RANGE = re.compile(r"range\((\d+)\)\)")
_VIEW = re.compile(r"(?<=[\w)\]])(?:\.\w+\([^()]*\)|\[[^\[\]]*\])")
MOST_RUNS = 400


def shrunk(program: Program, layout: Layout, fails: Callable[[Program, Layout], bool]) -> Case:
    """The smallest case found for which `fails` holds, as it does for the given one.

    After a change the next is tried from the same place on, so a pass is linear.
    """
    case, n_runs, start, found = (program, layout), 0, 0, False
    while n_runs < MOST_RUNS:
        for at, other in enumerate(_smaller(*case)):
            if at < start or other == case or not runs(other[0]):
                continue
            n_runs += 1
            if fails(*other):
                case, start, found = other, at, True
                break
        else:
            if not found:
                return case
            start, found = 0, False  # once more, until a whole pass finds nothing
    return case


def _smaller(program: Program, layout: Layout) -> Iterator[Case]:
    for simpler in layout.simpler():
        yield program, simpler
    for smaller in _programs(program):
        yield smaller.pruned(), layout


def _programs(program: Program) -> Iterator[Program]:
    for at, scope in enumerate(program.scopes):
        for smaller in _scopes(scope):
            scopes = (*program.scopes[:at], smaller, *program.scopes[at + 1 :])
            yield replace(program, scopes=scopes)


def _scopes(scope: Scope) -> Iterator[Scope]:
    if scope.beside:
        yield replace(scope, beside="")
    for result in scope.results if len(scope.results) > 1 else ():
        yield _living(replace(scope, results=(result,)))
    for k in range(len(scope.results) if len(scope.results) > 1 else 0):
        yield replace(scope, results=scope.results[:k] + scope.results[k + 1 :])
    yield _living(scope)
    for k in reversed(range(len(scope.lines))):
        if (less := _without_statement(scope, k)) is not None:
            yield less
    for k, line in enumerate(scope.lines):
        for name in sorted(line.names - set(line.writes)):
            if line.writes:
                yield _replaced(scope, k, name)
        for match in _VIEW.finditer(line.text):
            text = line.text[: match.start()] + line.text[match.end() :]
            lines = (*scope.lines[:k], replace(line, text=text, shape=""), *scope.lines[k + 1 :])
            yield replace(scope, lines=lines)
    for k, init in enumerate(scope.init):
        for match in _RANGE.finditer(init):
            for n in (1, 2, int(match[1]) - 1):
                if 0 < n < int(match[1]):
                    fewer = init.replace(match[0], f"range({n}))")
                    yield replace(scope, init=(*scope.init[:k], fewer, *scope.init[k + 1 :]))
        if "requires_grad_" in init or ".weight = " in init:
            yield replace(scope, init=scope.init[:k] + scope.init[k + 1 :])


def _living(scope: Scope) -> Scope:
    """Without statements whose values no result needs."""
    needed, kept = set(NAMES.findall(scope.returned)), list[Line]()
    for line in reversed(scope.lines):
        if line.names & needed:
            needed |= line.names
            kept.insert(0, line)
    return replace(scope, lines=tuple(kept))


def _without_statement(scope: Scope, k: int) -> Scope | None:
    """Without a statement and all that reads what it writes; None if no result is left."""
    gone = set(scope.lines[k].writes)
    kept: list[Line] = [*scope.lines[:k]]
    for line in scope.lines[k + 1 :]:
        if line.names & gone:
            gone |= set(line.writes)
        else:
            kept.append(line)
    results = tuple(r for r in scope.results if not set(NAMES.findall(r)) & gone)
    beside = "" if set(NAMES.findall(scope.beside)) & gone else scope.beside
    if not results:
        return None
    return replace(scope, lines=tuple(kept), results=results, beside=beside)


def _replaced(scope: Scope, k: int, by: str) -> Scope:
    """Without a statement; what reads its value reads one of those that it read."""
    (name, *_), lines = scope.lines[k].writes, [*scope.lines[:k]]
    for line in scope.lines[k + 1 :]:
        lines.append(replace(line, text=renamed(line.text, name, by)))
    results = tuple(renamed(r, name, by) for r in scope.results)
    return replace(
        scope, lines=tuple(lines), results=results, beside=renamed(scope.beside, name, by)
    )
