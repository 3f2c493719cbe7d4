"""Documents as trees of Python values, or as bytes, and mutations drawn from a `random.Random`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any


class Members(list[list[Any]]):
    """The members of an object as [key, value]; a key may occur twice."""


# A place that holds a value: a list, and the index in it.
Place = tuple[list[Any], int]


def tree_of(value: Any) -> Any:
    """A tree of parsed JSON or TOML."""
    if isinstance(value, dict):
        return Members([key, tree_of(item)] for key, item in value.items())
    if isinstance(value, list):
        return [tree_of(item) for item in value]
    return value


def places(tree: Any) -> Iterator[Place]:
    """Every place of a value below the root, in order."""
    if isinstance(tree, Members):
        for member in tree:
            yield member, 1
            yield from places(member[1])
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield tree, i
            yield from places(item)


def containers(tree: Any) -> list[list[Any]]:
    """Every object and list with something in it, the root too."""
    found = [holder[i] for holder, i in places(tree)]
    return [value for value in (tree, *found) if isinstance(value, list) and value]


def to_json(tree: Any) -> str:
    """JSON, with keys that occur twice, and numbers that are none."""
    if isinstance(tree, Members):
        return "{" + ", ".join(f"{json.dumps(k)}: {to_json(v)}" for k, v in tree) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(to_json, tree)) + "]"
    return tree.text if isinstance(tree, Raw) else json.dumps(tree)


@dataclass(frozen=True)
class Raw:
    """A value that is printed as it is."""

    text: str


NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, -16, 16.0, 0.5, 1e-320, 1e308, 2**31, 2**63, 10**9, 10**40, math.nan),
    *(math.inf, -math.inf, Raw("1" * 5000), Raw("1e99999"), Raw("-0")),
)
TEXTS = (
    *("", " ", "I R", "I S(0)", "I R -> I R", "S(" + "9" * 5000 + ")", "I S(" + "9" * 5000 + ")"),
    *("a\nb", "\x00", "\x1b[2J", "\ud800", "__import__('os')", "x" * 20_000),
    *"x 1 dp S(0)@1 S(99999999999999999999) é 模型 class torch ../../../etc/passwd".split(),
    *"/etc/passwd fp64 1f1b cpu-local h100-sxm explicit int64 quint8 aten.mm.default".split(),
    "up/linear#0",
)
OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], [1], [[]], Members(), Members([["x", 1]]), [None, "x"]),
    *(Raw("[" * 500 + "]" * 500), Raw("[" * 100_000 + "]" * 100_000), Raw('{"x":' * 2000)),
    *(Members([["__class__", "x"]]), ["x"] * 2000),
)


def mutated(tree: Any, random: Random, more: tuple[Any, ...] = ()) -> None:
    """Mutate a tree in place, once or a few times; `more` are values to put in."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        random.choice(_MUTATIONS)(tree, random, more)


def _replaced(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    holder, i = random.choice(list(places(tree)))
    kinds = (NUMBERS, TEXTS, OTHERS, *((more,) if more else ()))
    holder[i] = random.choice(random.choice(kinds))


def _nudged(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    """A number that is a bit different, or a text with a letter more, less or another."""
    holder, i = random.choice(list(places(tree)))
    value = holder[i]
    if isinstance(value, str):
        at = random.randint(0, len(value))
        holder[i] = (
            value[:at]
            + random.choice(("", "S", "(", ")", "0", " ", ",", "R", "é"))
            + (value[at + random.randint(0, 1) :])
        )
    elif isinstance(value, bool):
        holder[i] = not value
    elif isinstance(value, int | float):
        holder[i] = random.choice(
            (value + 1, value - 1, value * 2, -value, float(value), str(value))
        )
    else:
        _replaced(tree, random, more)


def _removed(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    holder = random.choice(containers(tree))
    del holder[random.randrange(len(holder))]


def _doubled(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    holder = random.choice(containers(tree))
    item = holder[random.randrange(len(holder))]
    copy = [*item] if isinstance(holder, Members) else item
    holder.insert(random.randint(0, len(holder)), copy)


def _renamed(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    objects = [holder for holder in containers(tree) if isinstance(holder, Members)]
    keys = [key for holder in objects for key, _ in holder]
    member = random.choice(random.choice(objects)) if objects else ["", None]
    member[0] = random.choice((random.choice(keys), random.choice(TEXTS), f"{member[0]}_"))


def _swapped(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    """Two values change places, or one is copied over the other."""
    every = list(places(tree))
    (one, i), (other, j) = random.choice(every), random.choice(every)
    first, second = one[i], other[j]
    if _holds(first, other) or _holds(second, one):
        return
    one[i] = second
    if random.random() < 0.5:
        other[j] = first


def _holds(value: Any, holder: list[Any]) -> bool:
    return any(inside is holder for inside in (value, *(h for h, _ in places(value))))


def _shuffled(tree: Any, random: Random, more: tuple[Any, ...]) -> None:
    random.shuffle(random.choice(containers(tree)))


_MUTATIONS: tuple[Callable[[Any, Random, tuple[Any, ...]], None], ...] = (
    *(_replaced, _replaced, _replaced, _nudged, _nudged, _nudged, _removed, _doubled, _renamed),
    *(_swapped, _shuffled),
)


def damaged(content: bytes, random: Random) -> bytes:
    """A file whose bytes are damaged."""
    at = random.randrange(len(content))
    to = min(len(content), at + random.choice((1, 2, 16, 200)))
    match random.randrange(8):
        case 0:
            return content[:at]
        case 1:
            flipped = bytes([content[at] ^ (1 << random.randrange(8))])
            return content[:at] + flipped + content[at + 1 :]
        case 2:
            return content[:at] + content[to:]
        case 3:
            return content[:to] + content[at:]
        case 4:
            return content[:at] + random.randbytes(random.choice((1, 3, 40))) + content[at:]
        case 5:
            deep = random.choice((b"[", b"{", b'{"a":', b"[[", b"a."))
            return content[:at] + deep * random.choice((3, 1000, 100_000)) + content[at:]
        case 6:
            text = content.decode("utf-8", "replace")
            codecs = ("utf-16", "utf-32", "utf-8-sig", "utf-7")
            return text.encode(random.choice(codecs))
        case _:
            words = b'NaN Infinity null - 1e9999 " \\u0000 \x00 //'.split()
            return content[:at] + random.choice(words) + content[to:]
