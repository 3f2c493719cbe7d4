"""What a generated program does, without tensors: its calls in order, and where values end.

The source runs with stand-ins. A call of an operator or a collective is an event with its
arguments; a value that ends is noted after the call before. Views are written as expressions of
what they view: they are no events.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from autopar.program import JointProgram, taken_parameters

_VIEWS = frozenset("view t transpose expand unsqueeze squeeze slice detach reshape".split())


class Log:
    """Events: ("call", text) and, between two calls, which values ended."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[int, ...]]] = []
        self._ended: list[int] = []
        self._numbers = itertools.count()

    def call(self, text: str) -> None:
        self.flush()
        self.events.append((text, ()))

    def flush(self) -> None:
        if self.events:
            self.events[-1] = (self.events[-1][0], tuple(sorted(self._ended)))
            self._ended = []

    def value(self) -> Value:
        number = next(self._numbers)
        made = Value(self, f"v{number}")
        weakref.finalize(made, self._ended.append, number)
        return made


class Value:
    """A tensor, or what a function keeps; `base` is what a view views."""

    def __init__(self, log: Log, text: str, base: object = None) -> None:
        self.log, self.text, self.base = log, text, base

    def __repr__(self) -> str:
        return self.text

    def clone(self) -> Value:
        self.log.call(f"clone({self})")
        return self.log.value()


class Handle:
    """A collective under way, which holds its tensors until it is waited for."""

    def __init__(self, log: Log, held: object) -> None:
        self.log, self.held = log, held
        self.result = log.value()

    def __repr__(self) -> str:
        return f"handle of {self.result}"

    def wait(self) -> Value:
        self.log.call(f"wait({self})")
        result = self.result
        del self.held, self.result
        return result


class Name:
    """A module, an operator or a group, by its name."""

    def __init__(self, log: Log, text: str) -> None:
        self._log, self._text = log, text

    def __getattr__(self, name: str) -> Name:
        return Name(self._log, f"{self._text}.{name}")

    def __repr__(self) -> str:
        return self._text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        text = f"{self._text}({args}, {sorted(kwargs.items())})"
        words = self._text.split(".")
        if words[-1] == "group":
            return Name(self._log, f"group{args[0]}")
        if words[:3] == ["torch", "ops", "aten"] and words[3] in _VIEWS:
            return Value(self._log, text, args[0])
        self._log.call(text)
        if words[:4] == ["torch", "ops", "aten", "add_"]:
            return Value(self._log, text, args[0])
        if words[-1].startswith("start"):
            return Handle(self._log, args)
        return self._log.value()


class _Unpacking(ast.NodeTransformer):
    """`a, b = f()` -> `a, b = unpack(f(), 2)`."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (target,) = node.targets
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call):
            count = ast.Constant(len(target.elts))
            node.value = ast.Call(ast.Name("unpack", ast.Load()), [node.value, count], [])
        return node


def events(source: str, joint: JointProgram) -> list[tuple[str, tuple[int, ...]]]:
    """The events of forward, then backward, of one microbatch."""
    log = Log()
    tree = ast.parse(source)
    words: dict[str, Any] = {"torch": Name(log, "torch")}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            words |= {alias.name: Name(log, alias.name) for alias in node.names}
    tree.body = [n for n in tree.body if not isinstance(n, ast.Import | ast.ImportFrom)]

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        yield

    def unpack(value: Any, count: int) -> Any:
        if isinstance(value, list | tuple):
            return value
        return [log.value() for _ in range(count)]

    def ready(position: int, value: Any) -> None:
        log.call(f"ready({position}, {value})")

    words |= {"phase": phase, "unpack": unpack}
    exec(compile(ast.fix_missing_locations(_Unpacking().visit(tree)), "<stage>", "exec"), words)
    stage, env = joint.stage, Name(log, "env")
    parameters = [log.value() for _ in taken_parameters(stage)]
    given = [[log.value() for _ in stage.delivered]]
    given += [[log.value() for _ in stage.received]] if stage.received else []
    _, saved = words["forward"](parameters, *given, env)
    del given
    log.call("backward")
    cotangents = [log.value() for _ in joint.cotangents]
    words["backward"](saved, cotangents, ready, env)
    log.flush()
    return log.events
