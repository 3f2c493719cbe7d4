"""Reads JSON that comes from outside: every value is checked where it is taken.

A `Json` is a value with its place, as `stages[1].axes.dp`. Each of its methods says what it expects
there, and raises `PlanError` with the place, the value found and what is expected. What Python's
parser accepts beyond JSON (keys that occur twice, NaN, Infinity) is refused, and so is what is
larger than a limit, before anything is made of it.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import PlanError

# The plan of a model of 100 blocks, written out, has less than a megabyte.
MOST_FILE_BYTES = 32 * 2**20
MOST_CHARACTERS = 10_000
MOST_ENTRIES = 1_000_000
# Longer integers are read as floats, because Python takes quadratic time to read them.
_MOST_DIGITS = 30
_SHOWN_CHARACTERS = 60


class _Members(tuple[tuple[str, object], ...]):
    """The members of an object, as they are written: a key may occur twice."""


@dataclass(frozen=True)
class Json:
    """A value in a JSON document. `place` is its path, `where` names the document."""

    value: object
    where: str
    place: str = ""

    def refused(self, expected: str, hint: str | None = None) -> PlanError:
        """The error that this value is not what is expected."""
        place = self.place or "the document"
        return PlanError(
            f"{place} is {_shown(self.value)}; expected {expected}", where=self.where, hint=hint
        )

    @property
    def is_null(self) -> bool:
        return self.value is None

    def text(self, expected: str = "one line of text") -> str:
        """Printable text: it is shown on terminals and in comments."""
        text = self.value
        if not isinstance(text, str):
            raise self.refused(expected)
        if len(text) > MOST_CHARACTERS:
            raise self.refused(f"{expected}, of at most {MOST_CHARACTERS:,} characters")
        if not text.isprintable():
            raise self.refused(expected)
        return text

    def word(self, words: Collection[str]) -> str:
        """One of some words."""
        if not isinstance(self.value, str) or self.value not in words:
            raise self.refused(f"one of {', '.join(sorted(words))}")
        return self.value

    def whole(self, least: int, most: int) -> int:
        number = self.value
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise self.refused(f"a whole number from {least:,} to {most:,}")
        return number

    def number(self, least: float, most: float) -> float:
        number = self.value
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not least <= number <= most:  # type: ignore[operator]
            raise self.refused(f"a number from {least:g} to {most:g}")
        return float(number)  # type: ignore[arg-type]

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.refused("true or false")
        return self.value

    def items(self, least: int = 0, most: int = MOST_ENTRIES) -> list[Json]:
        """The items of a list."""
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            raise self.refused(f"a list of {least:,} to {most:,}")
        return [Json(item, self.where, f"{self.place}[{k}]") for k, item in enumerate(self.value)]

    def members(self, least: int = 0, most: int = MOST_ENTRIES) -> dict[str, Json]:
        """The members of an object, in order; their keys are printable text."""
        if not isinstance(self.value, _Members) or not least <= len(self.value) <= most:
            raise self.refused(f"an object of {least:,} to {most:,} keys")
        found: dict[str, Json] = {}
        for key, value in self.value:
            member = Json(value, self.where, self._place_of(key))
            Json(key, self.where, f"a key of {self.place or 'the document'}").text()
            if key in found:
                raise PlanError(f"{member.place} is there twice", where=self.where)
            found[key] = member
        return found

    def record(self, keys: Collection[str], optional: Collection[str] = ()) -> dict[str, Json]:
        """The members of an object that has all of `keys`, and may have the optional ones."""
        found = self.members()
        unknown = sorted(set(found) - {*keys, *optional})
        missing = sorted(set(keys) - set(found))
        if unknown or missing:
            place = self.place or "the document"
            short = [_cut(key) for key in unknown[:5]]
            raise PlanError(
                f"{place}: unknown keys {short}, missing keys {missing}", where=self.where
            )
        return found

    def _place_of(self, key: str) -> str:
        if key.isidentifier():
            return f"{self.place}.{_cut(key)}" if self.place else _cut(key)
        return f"{self.place}[{_cut(key)!r}]"


def read_json(path: str | Path) -> Json:
    """The document in a file. Raises `PlanError` for one that is not there, or is no JSON."""
    file = Path(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise PlanError(f"{file} is no file, but a folder or a device")
        size_bytes = found.st_size
        if size_bytes > MOST_FILE_BYTES:
            raise PlanError(
                f"{file} has {size_bytes:,} bytes; a plan has at most {MOST_FILE_BYTES:,}"
            )
        return parse_json(file.read_bytes(), str(file))
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # a path with a null character
        raise PlanError(f"cannot read {str(file)!r}: {error}") from error


def parse_json(content: str | bytes, where: str) -> Json:
    """The document in a text. Raises `PlanError` for what is no JSON; `where` names the text."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        return Json(json.loads(text, object_pairs_hook=_Members, parse_int=_integer), where)
    except UnicodeDecodeError as error:
        raise PlanError(f"{where} is not UTF-8, from byte {error.start} on") from None
    except json.JSONDecodeError as error:
        raise PlanError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise PlanError(f"{where} nests lists or objects too deeply") from None


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def _shown(value: object) -> str:
    """A value in an error: short, on one line."""
    match value:
        case None | bool():
            return json.dumps(value)
        case str():
            return repr(_cut(value))
        case float() if not math.isfinite(value):
            return "a number that is not finite"
        case list():
            return f"a list of {len(value):,}"
        case _Members():
            return f"an object of {len(value):,} keys"
        case _:
            return str(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
