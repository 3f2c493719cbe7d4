"""Proves of a generated text that each name is written before it is read, and not deleted before.

The verifier proves lines. The text puts equal pieces into functions (`fold.py`), so what one piece
hands to another is proved here: functions are walked statement by statement, loops twice.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence

from autopar.errors import VerificationError

_OF_PYTHON = frozenset(dir(builtins))


def check_defined(text: str) -> None:
    """Raises `VerificationError` for a name that is read where it has no value."""
    tree = ast.parse(text)
    known = _OF_PYTHON | {name for node in tree.body for name in _written(node)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            own = {name for statement in node.body for name in _written(statement)}
            arguments = {argument.arg for argument in node.args.args}
            _Walk(node.name, known - own).run(node.body, arguments)


def _written(node: ast.AST) -> Iterable[str]:
    """Names that a statement writes or deletes, in its blocks, too."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0]
    else:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                yield inner.id


class _Walk:
    """One function; `known` are the names of the file that it does not write itself."""

    def __init__(self, function: str, known: set[str] | frozenset[str]) -> None:
        self.function = function
        self.known = known

    def run(self, statements: Sequence[ast.stmt], alive: set[str]) -> None:
        """Walk some statements; `alive` are the names that have values, kept up to date."""
        for statement in statements:
            match statement:
                case ast.For(target=target, iter=every, body=body):
                    self.read(every, alive)
                    for _ in range(2):
                        alive.update(_written(target))
                        self.run(body, alive)
                case ast.With(items=items, body=body):
                    for item in items:
                        self.read(item.context_expr, alive)
                        alive.update(_written(item))
                    self.run(body, alive)
                case ast.Delete():
                    gone = list(_written(statement))
                    self.require(gone, statement, alive)
                    alive.difference_update(gone)
                case _:
                    self.read(statement, alive)
                    alive.update(_written(statement))

    def read(self, node: ast.AST, alive: set[str]) -> None:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        inside = {n.id for c in ast.walk(node) if isinstance(c, ast.comprehension)
                  for n in ast.walk(c.target) if isinstance(n, ast.Name)}  # fmt: skip
        read = [n.id for n in names if isinstance(n.ctx, ast.Load) and n.id not in inside]
        self.require(read, node, alive)

    def require(self, names: Iterable[str], node: ast.AST, alive: set[str]) -> None:
        for name in names:
            if name not in alive and name not in self.known:
                raise VerificationError(
                    f"{name} has no value in line {getattr(node, 'lineno', '?')} of the generated "
                    f"`{self.function}`",
                    hint="this is a bug of autopar",
                )
