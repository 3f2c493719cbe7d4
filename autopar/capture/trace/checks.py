"""Passes over checks of values that only raise: `if labels.max() >= n: raise ...`, `assert ...`.

Their condition depends on the data, which a trace does not have. So the trace goes on as if
nothing was raised, and the audit says that the check is not made. The statement is found by the
frame that asks for the value: it must be an `if` whose body only raises, or an `assert`, and the
value one of its conditions (behind `not`, `and` and `or`). All other branches are refused.
"""

from __future__ import annotations

import ast
import linecache
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree as pytree

from autopar.capture.findings import Findings
from autopar.capture.trace.exchange import Exchange

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])
_WHERE_CHECKS_ARE = ("nn", "distributions")  # parts of torch that check their arguments
Position = tuple[int | None, int | None, int | None, int | None]


@contextmanager
def checks_passed(findings: Findings) -> Iterator[None]:
    """Checks are passed over in this thread, and noted in `findings`."""
    _here.findings = findings
    with _exchange.on():
        yield


def evaluate(shapes: Any, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
    """What `ShapeEnv.evaluate_sym_node` does in a trace."""
    is_open = isinstance(sym_node.expr, Boolean) and free_unbacked_symbols(sym_node.expr)
    frame = _asking_frame() if is_open else None
    answer = None if frame is None else _answer(frame)
    if frame is None or answer is None:
        return _exchange.original(shapes, sym_node, *args, **kwargs)
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    why = "depends on the data and only raises, so it is not made"
    _here.findings.add("replaced", "a check of values", why, where)
    return sympy.true if answer else sympy.false


_here = threading.local()
_exchange = Exchange(ShapeEnv.__dict__["evaluate_sym_node"], evaluate)


def _asking_frame() -> FrameType | None:
    """The frame of the code that asks for the truth of a value."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code):
        frame = frame.f_back
    return frame


def _is_machinery(code: CodeType) -> bool:
    file = code.co_filename
    if code is torch._assert.__code__:
        return False
    if file.startswith(_TORCH):
        return not file.startswith(tuple(f"{_TORCH}/{part}/" for part in _WHERE_CHECKS_ARE))
    return file.startswith((_OWN, "<"))


def _answer(frame: FrameType) -> bool | None:
    """What the value must be so that nothing is raised; None if that is not known."""
    positions = list(frame.f_code.co_positions())
    position = positions[frame.f_lasti // 2] if frame.f_lasti >= 0 else (None,) * 4
    for statement in _checks(frame.f_code.co_filename):
        answers = {wanted for place, wanted in _conditions(statement) if place == position}
        if answers:
            return answers.pop() if len(answers) == 1 else None
    return None


@lru_cache(maxsize=64)
def _checks(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """The statements of a file that can only raise."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_raises(node))
    )


def _only_raises(statement: ast.If) -> bool:
    *before, last = statement.body
    return isinstance(last, ast.Raise) and all(isinstance(s, ast.Assign) for s in before)


def _conditions(statement: ast.If | ast.Assert) -> Iterator[tuple[Position, bool]]:
    """The places where Python may ask for each condition, and what it must be.

    These are the condition itself and all that it is a part of, up to the statement.
    """

    def parts(
        test: ast.expr, wanted: bool, places: list[Position]
    ) -> Iterator[tuple[Position, bool]]:
        places = [*places, _position(test)]
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from parts(test.operand, not wanted, places)
        elif isinstance(test, ast.BoolOp):
            for value in test.values:
                yield from parts(value, wanted, places)
        else:
            yield from ((place, wanted) for place in places)

    wanted = isinstance(statement, ast.Assert)
    yield from parts(statement.test, wanted, [_position(statement)])


def _position(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def disable_checks(graph: fx.Graph) -> None:
    """Erase what nothing reads of the values that depend on data: only checks asked for them."""
    for node in reversed(graph.nodes):
        values = pytree.tree_leaves(node.meta.get("val"))
        is_check = node.op == "call_function" and (any(map(_is_open, values)) or _asserts(node))
        if is_check and not node.users:
            graph.erase_node(node)


def _is_open(value: Any) -> bool:
    """Is it a number, or a tensor of a shape, that depends on the data?"""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _asserts(node: fx.Node) -> bool:
    aten = torch.ops.aten
    return getattr(node.target, "overloadpacket", None) in (
        aten._assert_scalar, aten.sym_constrain_range, aten.sym_constrain_range_for_size,
    )  # fmt: skip
