"""Fills the holes of a template: values that fit, views of them, dims and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.programs.grammar import COMPLEX_VIEWS, SAME_SHAPE, VIEWS_OF
from tests.fuzz.programs.program import BATCH, HELPERS, IMPORTS, NAMES, run_text

MOST_ELEMENTS = 2048
WIDTHS = (4, 4, 8, 6)
HOLE = re.compile(r"\$(\w+)")
# What torch says of statements that it refuses.
REFUSED = (
    RuntimeError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError,
    NotImplementedError, AssertionError, KeyError, NameError, SyntaxError,
)  # fmt: skip
# What statements may name: torch, and the helpers.
SPACE = run_text("\n\n".join((IMPORTS, *HELPERS.values())), "<names>")


class NoDrawError(Exception):
    """There is no value for a hole."""


@dataclass
class Holes:
    """Values by name, and which of them nothing reads yet; what holes are filled with."""

    rng: Random
    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=lambda: dict(SPACE))
    holder: torch.nn.Module = field(default_factory=torch.nn.Module)

    def filled(self, template: str) -> str:
        """The template with all holes filled."""
        letters = (match[1] for match in HOLE.finditer(template))
        first = next((x for x in letters if x in _CHOICES and x not in _LIKE_MAIN), None)
        main_text = _CHOICES[first](self, None, "") if first else ""
        main = self._value_of(main_text) if first else None
        chosen = {first: main_text} if first else {}

        def hole(match: re.Match[str]) -> str:
            letter = match[1]
            if letter in chosen:
                return chosen[letter]
            if letter in _CHOICES:
                text = _CHOICES[letter](self, main, main_text)
            elif letter in _SIZES:
                if main is None:
                    raise NoDrawError
                text = str(_SIZES[letter](self, main, chosen))
            elif letter in _SYMBOLIC:
                if main is None:
                    raise NoDrawError
                text = _SYMBOLIC[letter].format(main_text)
            else:
                raise KeyError(f"no hole ${letter} in {template}")
            if letter not in _DRAWN_ANEW:
                chosen[letter] = text
            return text

        return HOLE.sub(hole, template)

    def _value_of(self, text: str) -> Any:
        return eval(text, self.space, {"self": self.holder, **self.values})

    def pick(self, fits: Callable[[Any], bool]) -> str:
        """A name whose value fits, rather one that nothing reads yet."""
        found = [n for n, v in self.values.items() if is_tensor(v) and fits(v)]
        if not found:
            raise NoDrawError
        unread = [n for n in found if n in self.unread and self.values[n].requires_grad]
        if unread and self.rng.random() < 0.55:
            return self.rng.choice(unread)
        weights = [3.0 if self.values[n].requires_grad else 1.0 for n in found]
        return self.rng.choices(found, weights)[0]

    def viewed(self, name: str, table: tuple[str, ...] = VIEWS_OF, chance: float = 0.25) -> str:
        """The name, or a view of it."""
        value = self.values[name]
        while self.rng.random() < chance:
            text = self._sized(self.rng.choice(table), name, value)
            try:
                seen = eval(f"{name}{text}", self.space, {name: value})
            except REFUSED:
                continue
            if 0 < seen.numel() <= MOST_ELEMENTS and seen.dim() > 0:
                return f"{name}{text}"
        return name

    def of_shape(self, main: Tensor, main_text: str) -> str:
        """A real value of `main`'s shape: often another view of the same memory."""
        if main is None:
            raise NoDrawError
        base = NAMES.findall(main_text)
        if base and self.rng.random() < 0.6:
            value = self.values[base[0]]
            for _ in range(6):
                text = self._sized(self.rng.choice(SAME_SHAPE), base[0], value)
                try:
                    seen = eval(f"{base[0]}{text}", self.space, {base[0]: value})
                except REFUSED:
                    continue
                if seen.shape == main.shape:
                    return f"{base[0]}{text}"
        return self.pick(lambda v: is_real(v) and v.shape == main.shape)

    def _sized(self, view: str, name: str, value: Tensor) -> str:
        """A view with its sizes filled in."""
        chosen: dict[str, str] = {}

        def hole(match: re.Match[str]) -> str:
            if (letter := match[1]) in _SYMBOLIC:
                return _SYMBOLIC[letter].format(name)
            chosen[letter] = str(_SIZES[letter](self, value, chosen))
            return chosen[letter]

        return HOLE.sub(hole, view)


def is_real(value: Any) -> bool:
    return is_tensor(value) and value.is_floating_point()


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _with_dims(*dims: int) -> Callable[[Any], bool]:
    return lambda v: is_real(v) and v.dim() in dims


def _dim(draw: Holes, main: Tensor, chosen: dict[str, str]) -> int:
    """Seldom the first, which mostly is the batch."""
    n = main.dim()
    if n == 0:
        return 0
    return draw.rng.randrange(1, n) if n > 1 and draw.rng.random() < 0.9 else draw.rng.randrange(n)


def _size(main: Tensor, chosen: dict[str, str]) -> int:
    return main.shape[int(chosen["d"])] if "d" in chosen and main.dim() else 1


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or n == 1 for m, n in pairs) and b.dim() <= a.dim()


# Holes that are values. `$A` is a name that may be written in place.
_CHOICES: dict[str, Callable[[Holes, Any, str], str]] = {
    "a": lambda d, m, t: d.viewed(d.pick(lambda v: is_real(v) and v.dim() > 0)),
    "b": lambda d, m, t: d.of_shape(m, t),
    "c": lambda d, m, t: d.pick(lambda v: is_real(v) and m is not None and _broadcasts(m, v)),
    "r": lambda d, m, t: d.viewed(d.pick(_with_dims(1, 2, 3))),
    "two": lambda d, m, t: d.viewed(d.pick(_with_dims(2)), chance=0.1),
    "f": lambda d, m, t: d.pick(lambda v: is_real(v) and v.dim() == 3 and v.shape[0] == BATCH),
    "three": lambda d, m, t: d.viewed(d.pick(_with_dims(3))),
    "g": lambda d, m, t: d.pick(_with_dims(4)),
    "video": lambda d, m, t: d.pick(_with_dims(5)),
    "A": lambda d, m, t: d.pick(lambda v: is_real(v) and v.dim() > 0 and _is_writable(v)),
    "i": lambda d, m, t: d.pick(lambda v: v.dtype == torch.int64 and v.dim() > 0),
    "I": lambda d, m, t: d.pick(lambda v: v.dtype == torch.int64 and v.shape == _shape(m)),
    "m": lambda d, m, t: d.pick(lambda v: v.dtype == torch.bool),
    "z": lambda d, m, t: d.viewed(d.pick(lambda v: v.is_complex()), COMPLEX_VIEWS),
    "Z": lambda d, m, t: d.pick(lambda v: v.is_complex() and v.shape == _shape(m)),
    "S": lambda d, m, t: d.rng.choice(
        [k for k, v in d.values.items() if isinstance(v, list) and v] or _none()
    ),
}  # fmt: skip
_SIZES: dict[str, Callable[[Holes, Any, dict[str, str]], Any]] = {
    "d": _dim,
    "e": _dim,
    "N": lambda d, m, c: _size(m, c),
    "half": lambda d, m, c: max(1, _size(m, c) // 2),
    "n": lambda d, m, c: d.rng.randrange(_size(m, c)),
    "H": lambda d, m, c: m.shape[-1],
    "L": lambda d, m, c: m.shape[-2] if m.dim() > 1 else 1,
    "C": lambda d, m, c: m.shape[1] if m.dim() > 1 else 1,
    "rows": lambda d, m, c: tuple(m.shape[1:]),
    "rest": lambda d, m, c: ", ".join(str(n if d.rng.random() < 0.7 else 1) for n in m.shape[1:]),
    "W": lambda d, m, c: d.rng.choice(WIDTHS),
    "W2": lambda d, m, c: d.rng.choice(WIDTHS),
    "k": lambda d, m, c: d.rng.choice((1, 1, 2, 3)),
    "g2": lambda d, m, c: d.rng.choice((1, 2)),
    "p": lambda d, m, c: d.rng.choice((0.1, 0.3, 0.5)),
    "s": lambda d, m, c: d.rng.choice((0.3, 0.5, -0.7, 1.5, 2)),
    "j": lambda d, m, c: d.rng.randrange(len(m)) if isinstance(m, list) else 0,
    "yes": lambda d, m, c: d.rng.choice((True, False)),
}
# Holes that are filled to fit the main value.
_LIKE_MAIN = {"b", "c", "I", "Z"}
# Sizes that may change with the batch are read off the value.
_SYMBOLIC = {"B": "{}.shape[0]", "shape": "{}.shape"}
_DRAWN_ANEW = {"s", "c"}


def _is_writable(value: Tensor) -> bool:
    """Not an input, and no two elements in one place: torch leaves what that gives undefined. Nor
    what torch refuses to read, because other views of its memory were written."""
    try:
        if value.is_leaf:
            return False
    except RuntimeError:
        return False
    size = value.untyped_storage().size() // value.element_size()
    places = torch.arange(size).as_strided(value.shape, value.stride(), value.storage_offset())
    return places.unique().numel() == value.numel()


def _shape(main: Any) -> Any:
    return None if main is None else main.shape


def _none() -> list[str]:
    raise NoDrawError
