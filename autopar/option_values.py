"""Checks of option values that know nothing of any option.

They raise `OptionError` for a value that is not allowed, and `NotSupportedError` for a documented
one that is not built.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from autopar.errors import NotSupportedError, OptionError

_BYTES = {
    "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def closest(word: str, words: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"did you mean {close[0]!r}?" if close else None


def check_count(name: str, value: Any) -> int:
    if not is_int(value) or value < 1:
        raise OptionError(f"{name} is a whole number of at least 1, not {value!r}")
    return int(value)


def parse_bytes(text: str) -> int:
    """`40GiB` -> 42949672960. Raises `OptionError` for a text without a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is not None and not match[2]:
        raise OptionError(
            f"{text!r} is a size without a unit", hint=f"write {text}GiB; {text}B is bytes"
        )
    if match is None or match[2].upper() not in _BYTES:
        raise OptionError(f"{text!r} is not a number of bytes", hint="write 40GiB or 40GB")
    return int(float(match[1]) * _BYTES[match[2].upper()])


def check_word(
    name: str, value: Any, built: Sequence[str], later: Sequence[str],
    others: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """`value` if it is in `built`; values in `later` are documented, but refused.

    `others`: other words that people use -> the one that is meant.
    """
    if not isinstance(value, str) or value not in (*built, *later):
        words = ", ".join(repr(w) for w in (*built, *later))
        hint = None
        if isinstance(value, str):
            meant = (others or {}).get(value.lower(), value)
            hint = closest(meant, (*built, *later))
        raise OptionError(f"{name} is one of {words}, not {value!r}", hint=hint)
    if value in later:
        raise NotSupportedError(
            f"{name}={value!r} is not supported yet",
            hint="use " + " or ".join(repr(w) for w in built),
        )
    return value


def one_of(name: str, built: str, later: str = "") -> Callable[[Any], str]:
    return lambda value: check_word(name, value, built.split(), later.split())


def positive(name: str, value: Any, unit: str) -> float | None:
    if value is None:
        return None
    number = is_int(value) or isinstance(value, float)
    if not number or not math.isfinite(value) or value <= 0:
        raise OptionError(f"{name} is a positive number of {unit}, not {value!r}")
    return value


def share(name: str, value: Any, of: str = "the step") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise OptionError(f"{name} is a share of {of}, from 0 to below 1, not {value!r}")
    return float(value)


def loss_function(value: Any) -> Any:
    """A function of the model's outputs and the batch, or None."""
    if value is None:
        return None
    if not callable(value):
        raise OptionError(
            f"loss_fn is a function, not {value!r}", hint="loss_fn=lambda outputs, batch: loss"
        )
    home = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if home == "torch.nn.functional" or type(value).__module__ == "torch.nn.modules.loss":
        raise OptionError(
            f"loss_fn={name} takes outputs and labels; autopar calls loss_fn with the model's "
            "outputs and the whole batch",
            hint='loss_fn=lambda outputs, batch: criterion(outputs, batch["labels"]), with the '
            "name of the labels in the batch, or their position",
        )
    try:
        signature = inspect.signature(getattr(value, "forward", value))
    except (TypeError, ValueError):  # of a builtin function
        return value
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise OptionError(
            f"loss_fn={name} takes {signature}; autopar calls it with the model's outputs and the "
            f"batch: {error}",
            hint="loss_fn=lambda outputs, batch: loss, where batch is what pm.step is given",
        ) from error
    return value
