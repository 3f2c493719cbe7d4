"""Names of the variables that backward adds: unused ones, made of the forward's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch


class Names:
    """Hands out names that no variable of the program has."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def new(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ... if that is taken."""
        name, n = wanted, self._next.get(wanted, 2)
        while name in self._taken:
            name, n = f"{wanted}_{n}", n + 1
        self._next[wanted] = n
        self._taken.add(name)
        return name


def result_word(kernel: torch._ops.OpOverload, position: int, stem: str) -> str:
    """What to call a result of a kernel after the operator `stem`.

    The name that the kernel's schema gives it (`logsumexp`), else the kernel's own (`view`), or
    "kept" where that would repeat the operator's (`layer_norm_kept`).
    """
    named, word = _words(kernel, position)
    return named or ("kept" if word.split("_")[0] in stem else word)


@lru_cache(maxsize=1 << 12)
def _words(kernel: torch._ops.OpOverload, position: int) -> tuple[str, str]:
    """The name that the schema gives to a result, if it says something, and the kernel's own."""
    schema = kernel._schema
    named = str(schema.returns[min(position, len(schema.returns) - 1)].name or "")
    word = schema.name.split("::")[1].strip("_").removeprefix("native_")
    return "" if named.startswith("out") else named, word
