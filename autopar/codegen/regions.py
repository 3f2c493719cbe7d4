"""Cuts straight lines of operators out of a function, into functions that a compiler can fuse.

A region is a maximal run of operators of one block: no collective, start, wait, message, random
draw or hand-over of a gradient is in it, and no line changes its place. So whatever hides behind a
region still does. Regions that differ in names alone share one function: they have equal shapes, so
a compiler makes one case of it.

`RegionNumbers` (`program/lines`) says which region a line is in, `marked` puts marks about the rows
of each, and `RegionCutter` makes functions of what is between marks.
"""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from autopar.codegen.blocks import Statement, del_row, is_comment
from autopar.codegen.words import LINE_LENGTH, name_rows
from autopar.errors import VerificationError
from autopar.program.lines import free_name, is_fused

# Decorators of regions, without and with CUDA graphs (`runtime/execute/compiled.py`).
DECORATORS = "compiled", "graphed"
# A region has at least so many kernels that can be fused with others.
LEAST_FUSED = 2
# No printed row has these characters.
_BEGIN, _END = "\0(", "\0)"


def count_regions(source: str) -> int:
    """How many functions of a generated file are compiled."""
    rows = source.splitlines()
    return sum(rows.count(f"@{decorator}") for decorator in DECORATORS)


def marked(statements: Sequence[Statement]) -> list[str]:
    """The rows of statements, with marks about each region; a comment over it stays outside."""
    rows: list[str] = []
    for region, own in itertools.groupby(statements, lambda s: s.region):
        first = len(rows)
        rows += [row for s in own for row in s.rows]
        if region is not None:
            while first < len(rows) and (not rows[first] or is_comment(rows[first])):
                first += 1
            rows[first:] = [_BEGIN, *rows[first:], _END]
    return rows


@dataclass
class RegionCutter:
    """Makes functions of the regions of one file.

    operators   global name of an operator -> operator
    taken       names that no function may have
    decorator   of its functions
    known       region, by its code with numbers for names, and types -> the function that it has
    """

    operators: Mapping[str, str]
    taken: set[str]
    decorator: str
    known: dict[str, str] = field(default_factory=dict)

    def cut(self, name: str, rows: Sequence[str]) -> tuple[list[str], list[str]]:
        """The functions of the regions of function `name`, and its rows with calls of them."""
        functions: list[str] = []
        out: list[str] = []
        dropped: set[str] = set()
        last_read, last_freed = _last_uses(rows)
        at = 0
        while at < len(rows):
            if rows[at] != _BEGIN:
                out += _keep_alive(rows[at : at + 1], dropped)
                at += 1
                continue
            end = rows.index(_END, at)
            own, at = _keep_alive(rows[at + 1 : end], dropped), end + 1
            read, freed = ({n for n, i in of.items() if i > end} for of in (last_read, last_freed))
            region = _Region.of(own, read, freed, self.operators)
            if region is None:
                out += own
                continue
            key = region.canonical()
            if key not in self.known:
                self.known[key] = free_name(f"{name}_region", self.taken)
                self.taken.add(self.known[key])
                functions += [f"@{self.decorator}", *region.function(self.known[key])]
            out += region.call(self.known[key])
            dropped |= region.dropped
        return functions, out


@dataclass(frozen=True)
class _Region:
    """Some rows of a function.

    reads      names that they take
    results    names that they make and later rows read
    freed      names that they take and free
    dropped    names that they make, and that later rows only free
    """

    rows: tuple[str, ...]
    reads: tuple[str, ...]
    results: tuple[str, ...]
    freed: tuple[str, ...]
    dropped: frozenset[str]
    operators: Mapping[str, str]

    @staticmethod
    def of(
        rows: Sequence[str], read_later: Set[str], freed_later: Set[str],
        operators: Mapping[str, str],
    ) -> _Region | None:  # fmt: skip
        """None for rows that would gain nothing, or that take more than tensors."""
        body = _parsed(rows)
        called = [n.func.id for n in ast.walk(body) if isinstance(n, ast.Call)
                  and isinstance(n.func, ast.Name)]  # fmt: skip
        if others := {*called} - operators.keys() - {"float"}:
            raise VerificationError(
                f"a region calls {', '.join(sorted(others))}, which is no operator",
                hint="this is a bug of autopar",
            )
        n_fused = sum(is_fused(operators[name]) for name in called if name in operators)
        if n_fused < LEAST_FUSED:
            return None
        reads: dict[str, None] = {}
        made: dict[str, None] = {}
        freed: list[str] = []
        for statement in body.body:
            for name in _names(statement, ast.Load):
                if name not in made and name not in operators and name != "torch":
                    reads[name] = None
            made |= dict.fromkeys(_names(statement, ast.Store))
            freed += [name for name in _names(statement, ast.Del) if name not in made]
        if "i" in reads:  # a number of the block, of which a compiler would make a case each
            return None
        results = tuple(name for name in made if name in read_later)
        dropped = frozenset(freed_later & made.keys() - read_later)
        return _Region(tuple(rows), tuple(reads), results, tuple(freed), dropped, operators)

    def canonical(self) -> str:
        """Its code, by numbers in place of names, and the types of what it makes."""
        number: dict[str, str] = {}
        text = f"    ({', '.join(self.reads)}), ({', '.join(self.results)})"
        tree = _parsed([text, *_keep_alive(self.rows, {*self.freed})])
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in self.operators and node.id != "torch":
                node.id = number.setdefault(node.id, f"v{len(number)}")
        types = [row.partition("  # ")[2] for row in self.rows if not is_comment(row)]
        return "\n".join([ast.unparse(tree), *types])

    def function(self, name: str) -> list[str]:
        return [
            *_bracketed(f"def {name}(", self.reads, "):"),
            *_keep_alive(self.rows, {*self.freed}),
            *_bracketed("    return (", self.results, ")"),
            "",
            "",
        ]

    def call(self, name: str) -> list[str]:
        frees = [del_row(self.freed)] if self.freed else []
        left = f"{', '.join(self.results)}{',' if len(self.results) == 1 else ''}"
        right = f"{name}({', '.join(self.reads)})"
        if len(row := f"    {left} = {right}") <= LINE_LENGTH:
            return [row, *frees]
        *start, last = _bracketed("    (", self.results, f") = {name}(")
        return [*start, *_bracketed(last, self.reads, ")"), *frees]


def _bracketed(start: str, names: Sequence[str], end: str) -> list[str]:
    """`start`, names and `end`, on one line if they fit; a comma says that it is a tuple."""
    row = f"{start}{', '.join(names)}{',' if len(names) == 1 else ''}{end}"
    if len(row) <= LINE_LENGTH:
        return [row]
    indent = len(start) - len(start.lstrip())
    return [start, *name_rows(names, indent + 4), f"{' ' * indent}{end}"]


def _last_uses(rows: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Name -> the last row that reads it, and the last that frees it."""
    read, freed = dict[str, int](), dict[str, int]()
    for node in ast.walk(_parsed([row if not row.startswith("\0") else "" for row in rows])):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            of = freed if isinstance(node.ctx, ast.Del) else read
            of[node.id] = max(of.get(node.id, 0), node.lineno - 1)
    return read, freed


def _parsed(rows: Sequence[str]) -> ast.Module:
    return ast.parse(textwrap.dedent("\n".join(rows)))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)]


def _keep_alive(rows: Sequence[str], names: Set[str]) -> list[str]:
    """The rows, none of which frees these names."""
    out: list[str] = []
    for row in rows:
        if row.startswith("    del "):
            kept = [n for n in row.removeprefix("    del ").split(", ") if n not in names]
            out += [del_row(kept)] if kept else []
        else:
            out.append(row)
    return out
