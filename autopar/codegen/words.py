"""Words of generated source: types, bytes and seconds in comments, arguments, wrapped lists."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch

from autopar.errors import OptionError
from autopar.placement import COLLECTIVES, Spec
from autopar.program.lines import CallLine, Local, MoveLine, Variable
from autopar.rules import find_operator
from autopar.units import format_bytes, format_seconds

COMMENT_COLUMN = 76
LINE_LENGTH = 100
_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8",
}  # fmt: skip


def assigned(names: Sequence[str], target: str) -> str:
    """The left side of an assignment: a list of one tensor is taken apart, too."""
    return ", ".join(names) + ("," if len(names) == 1 and _gives_list(target) else "")


@lru_cache
def _gives_list(target: str) -> bool:
    """Chunks, splits and the like; not functions of the runtime, which are no operators."""
    try:
        returns = find_operator(target)._schema.returns
    except OptionError:
        return False
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def call_words(args: Sequence[Any], kwargs: Any) -> str:
    return ", ".join(
        [
            *(value_text(a) for a in args),
            *(f"{name}={value_text(value)}" for name, value in kwargs.items()),
        ]
    )


def tuple_text(names: Sequence[str | None]) -> str:
    return f"({', '.join(map(str, names))}{',' if len(names) == 1 else ''})"


def name_rows(names: Sequence[str], n_spaces: int = 8) -> list[str]:
    """Names, as many to a line as fit."""
    indent = " " * n_spaces
    return textwrap.wrap(
        ", ".join(names) + ",", LINE_LENGTH, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def listed(start: str, names: Sequence[str], end: str) -> list[str]:
    """`start`, names and `end` on one line if they fit, else in lines between the two."""
    comma = "," if len(names) == 1 and not start.rstrip().endswith("[") else ""
    whole = f"{start}{', '.join(names)}{comma}{end}"
    if len(whole) <= LINE_LENGTH:
        return [whole]
    opens, closes = ("", "") if start.rstrip().endswith("[") else ("(", ")")
    n_spaces = len(start) - len(start.lstrip())
    rows = name_rows(names, n_spaces + 4)
    return [f"{start}{opens}", *rows, f"{' ' * n_spaces}{closes}{end}"]


def wrapped(start: str, words: Sequence[str]) -> list[str]:
    """`start` and the words on one line if they fit, else wrapped in brackets."""
    whole = f"{start}{', '.join(words)}"
    if len(whole) <= LINE_LENGTH:
        return [whole]
    return [f"{start}(", *(f"    {word}," for word in words), ")"]


def inner_calls(line: CallLine, phase: str) -> str:
    """Collectives inside a lowered operator in one phase: `3 all_reduces of 64 B`."""
    sizes: dict[tuple[str, int], int] = {}
    for call in line.inner:
        if call.phase == phase:
            key = call.kind, call.size_bytes
            sizes[key] = sizes.get(key, 0) + call.count
    return ", ".join(
        f"{n} {kind}{'s' if n > 1 else ''} of {format_bytes(size_bytes)}"
        for (kind, size_bytes), n in sizes.items()
    )


def value_text(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)


def traffic(line: MoveLine, direction: str) -> str:
    if direction == "forward":
        kind, size_bytes, time_s = line.move.forward, line.forward_bytes, line.forward_s
    else:
        kind, size_bytes, time_s = line.move.backward, line.backward_bytes, line.backward_s
    if kind not in COLLECTIVES:
        return "-" if kind == "identity" else kind
    return f"{kind} {format_bytes(size_bytes)} {format_seconds(time_s)}"


@lru_cache(maxsize=1 << 12)
def short_path(where: str) -> str:
    """A source location without what differs between machines: the path inside the package."""
    parts = PurePath(where).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return "/".join(parts[-2:])


def saved_text(variable: Local | Variable | None) -> str:
    """What a saved variable is; a lowered operator hands on a tuple."""
    if variable is None:
        return "for its backward"
    return f"{type_text(variable)}  {format_bytes(variable.size_bytes)}"


def type_text(variable: Local | Variable) -> str:
    return _type_text(variable.dtype, variable.shape, variable.spec)


@lru_cache(maxsize=1 << 12)
def _type_text(dtype: torch.dtype, shape: tuple[int, ...], spec: Spec | None) -> str:
    text = f"{dtype_text(dtype)}{list(shape)}"
    return text if spec is None else f"{text} {spec}"


def dtype_text(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def commented(code: str, comment: str) -> str:
    return f"{code.ljust(COMMENT_COLUMN)}  # {one_line(comment)}"


def one_line(text: str) -> str:
    """A text of the model's as a comment, which must not end before the text does."""
    return text if text.isprintable() else ascii(text)[1:-1]


def docstring_text(text: str) -> str:
    """A text of the model's within a docstring, which it must not end."""
    return one_line(text).replace("\\", "/").replace('"', "'")


def unpacked(source: str, items: Sequence[tuple[Local, str]]) -> list[str]:
    """The items of a list as variables, each with its type and where it is from."""
    if not items:
        return []
    rows = [
        commented(f"        {local.name},", f"{type_text(local)}  {origin}")
        for local, origin in items
    ]
    return ["    (", *rows, f"    ) = {source}"]


def taken_from(variable: str, names: Sequence[str]) -> list[str]:
    """The items of a list as variables; cleared, it does not hold what is freed."""
    if not names:
        return []
    short = f"    {', '.join(names)}{',' if len(names) == 1 else ''} = {variable}"
    if len(short) <= COMMENT_COLUMN:
        return [short, f"    {variable}.clear()"]
    return ["    (", *name_rows(names), f"    ) = {variable}", f"    {variable}.clear()"]


def reads_word(name: str, rows: Sequence[str]) -> bool:
    """Does the code of some rows have this word?"""
    return any(re.search(rf"\b{name}\b", row.partition("  # ")[0]) for row in rows)
