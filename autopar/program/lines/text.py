"""Programs as text that parses back: each dataclass is a call, with fields that are no default.

    StageProgram(
        name='Net',
        body=(
            CallLine(outs=(Local('h', (4, 8), torch.float32, Spec('S(0)')),), target='aten.relu...

A bare name is a variable (`Ref`); `torch.float32` is what torch calls so. The syntax is Python's,
but nothing is run: only the classes here and literals are read.
"""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from autopar.errors import OptionError
from autopar.placement import Move, Spec, Split
from autopar.program.lines import joint_program, stage_program
from autopar.program.lines.variables import Ref

_WIDTH = 100
# With more required fields than these, all are named.
_MOST_UNNAMED = 4
_OF_TORCH = torch.dtype | torch.layout | torch.memory_format
_HINT = "AUTOPAR_PRINT_AFTER=lower or =differentiate prints programs that can be read"


def program_text(program: object) -> str:
    """The text of a `StageProgram` or a `JointProgram`."""
    return f"{_broken(program, '')}\n"


def parse_programs(text: str, *kinds: type[Any]) -> list[Any]:
    """The programs of a text, all of `kinds`. Raises `OptionError` for anything else."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise OptionError(f"line {error.lineno}: {error.msg}", hint=_HINT) from error
    programs = []
    for statement in statements:
        value = _value(statement.value) if isinstance(statement, ast.Expr) else None
        if not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise OptionError(f"line {statement.lineno}: this is no {wanted}", hint=_HINT)
        programs.append(value)
    return programs


def _broken(value: object, indent: str, before: str = "") -> str:
    """The text of a value; if it is long, on rows of as many parts as fit, or of one line each."""
    flat = f"{before}{_flat(value)}"
    parts = _parts(value)
    if parts is None or len(indent) + len(flat) <= _WIDTH:
        return flat
    opening, items, closing = parts
    inner, rows = f"{indent}    ", list[str]()
    for name, item in items:
        part = f"{_broken(item, inner, name)},"
        is_line = not name and dataclasses.is_dataclass(item) and _parts(item) is not None
        joined = f"{rows[-1]} {part}" if rows and not is_line else "\n"
        if "\n" not in joined and len(inner) + len(joined) <= _WIDTH:
            rows[-1] = joined
        else:
            rows.append(part)
    return "\n".join((f"{before}{opening}", *(inner + row for row in rows), f"{indent}{closing}"))


def _flat(value: object) -> str:
    parts = _parts(value)
    if parts is None:
        return _atom(value)
    opening, items, closing = parts
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return f"{opening}{', '.join(name + _flat(item) for name, item in items)}{comma}{closing}"


def _parts(value: object) -> tuple[str, list[tuple[str, object]], str] | None:
    """What a value begins with, its parts by their names, and what it ends with."""
    match value:
        case Ref() | Spec() | torch.Size():
            return None
        case tuple():
            return "(", [("", item) for item in value], ")"
        case list():
            return "[", [("", item) for item in value], "]"
        case frozenset():
            return "frozenset({", [("", item) for item in sorted(value)], "})"
        case Mapping():
            return "{", [(f"{key!r}: ", item) for key, item in value.items()], "}"
    if not dataclasses.is_dataclass(value):
        return None
    fields = [f for f in dataclasses.fields(value) if f.init]
    required = [f for f in fields if _default(f) is dataclasses.MISSING]
    items = []
    for f in fields:
        item = getattr(value, f.name)
        is_named = f not in required or len(required) > _MOST_UNNAMED
        if f in required or item != _default(f):
            items.append((f"{f.name}=" if is_named else "", item))
    return f"{type(value).__name__}(", items, ")"


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _atom(value: object) -> str:
    match value:
        case Ref(name):
            return name if name.isidentifier() else f"Ref({name!r})"
        case Spec():
            return f"Spec({str(value)!r})"
        case torch.device():
            return f"device({str(value)!r})"
        case complex():
            return f"complex({str(value)!r})"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case torch.Size():
            return _flat(tuple(value))
    return str(value) if isinstance(value, _OF_TORCH) else repr(value)


# What a program may call, by name.
_CALLS: dict[str, Any] = {
    **{
        name: value
        for name, value in (vars(stage_program) | vars(joint_program)).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    },
    "Spec": Spec.parse,
    "Split": Split,
    "device": torch.device,
    **{kind.__name__: kind for kind in (Ref, Move, float, complex, frozenset)},
}


def _value(node: ast.expr) -> Any:
    """What an expression stands for."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return Ref(name)
        case ast.Tuple(items):
            return tuple(map(_value, items))
        case ast.List(items):
            return list(map(_value, items))
        case ast.Set(items):
            return set(map(_value, items))
        case ast.Dict(keys, values) if None not in keys:
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k}
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Attribute(ast.Name("torch"), name):
            value = getattr(torch, name, None)
            if isinstance(value, _OF_TORCH):
                return value
        case ast.Call(ast.Name(name), args, keywords):
            named = {k.arg: _value(k.value) for k in keywords if k.arg}
            if name in _CALLS:
                try:
                    made = _CALLS[name](*map(_value, args), **named)
                except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                    raise OptionError(f"line {node.lineno}: {error}", hint=_HINT) from error
                _check_types(made, node.lineno)
                return made
    raise OptionError(
        f"line {node.lineno}: `{ast.unparse(node)[:80]}` is not part of a program", hint=_HINT
    )


def _check_types(value: Any, line: int) -> None:
    """Refuse fields that are not of the types that their class declares."""
    for name, hint in _hints(value.__class__).items():
        item = getattr(value, name)
        if not _is_of(item, hint):
            what = f"line {line}: `{name}` of {type(value).__name__} is {_flat(item)[:80]}"
            raise OptionError(what, where=f"its type is {hint}", hint=_HINT)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


def _is_of(value: object, hint: Any) -> bool:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is float:
        return isinstance(value, int | float)
    if not isinstance(value, kind):
        return False
    if isinstance(value, tuple) and parts:
        each = parts[:1] * len(value) if parts[-1] is ... else parts
        return len(each) == len(value) and all(map(_is_of, value, each))
    if isinstance(value, frozenset):
        return all(_is_of(item, parts[0]) for item in value)
    if isinstance(value, Mapping):
        return all(_is_of(k, parts[0]) and _is_of(v, parts[1]) for k, v in value.items())
    return True
