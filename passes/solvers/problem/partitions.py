"""Partitions of a variable's choices into classes that a table does not tell apart.

Tables over specs tell few classes of choices apart. What elimination joins needs the *join* of the
partitions of all tables that mention a variable: two choices are of one class where they are in
each. Partitions are numbered, alike ones once; classes count up in the order of their first choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from autopar.passes.solvers.problem.machine_code import compiled
from autopar.passes.solvers.problem.problem import Codes


@dataclass(eq=False)
class Partitions:
    """Numbered partitions; `codes[p][k]` is the class of choice k, `firsts[p]` the first choice of
    every class."""

    codes: list[Codes] = field(default_factory=list)
    firsts: list[Codes] = field(default_factory=list)
    _grouped: dict[int, tuple[Codes, Codes]] = field(default_factory=dict)
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _exact: dict[bytes, int] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, codes: Codes) -> int:
        """The partition into choices of equal code."""
        codes = codes.astype(np.intp, copy=False)
        key = codes.tobytes()
        if key not in self._numbers:
            self._numbers[key] = self._of_classes(*_classes(codes))
        return self._numbers[key]

    def _of_classes(self, classes: Codes, firsts: Codes) -> int:
        key = classes.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.codes)
            self.codes.append(classes)
            self.firsts.append(firsts)
        return self._numbers[key]

    def exactly(self, codes: Codes) -> int:
        """The number of these codes, alike ones once, whatever partition they make."""
        return self._exact.setdefault(codes.astype(np.intp, copy=False).tobytes(), len(self._exact))

    def of_all(self, n_choices: int) -> int:
        """Every choice by itself."""
        return self.of(np.arange(n_choices))

    def of_none(self, n_choices: int) -> int:
        """All choices in one class."""
        return self.of(np.zeros(n_choices, dtype=np.intp))

    def n_classes(self, partition: int) -> int:
        return len(self.firsts[partition])

    def grouped(self, partition: int) -> tuple[Codes, Codes]:
        """The choices, class by class, and where every class begins."""
        if partition not in self._grouped:
            order = np.argsort(self.codes[partition], kind="stable")
            n = self.n_classes(partition)
            starts = np.searchsorted(self.codes[partition][order], np.arange(n))
            self._grouped[partition] = order, starts
        return self._grouped[partition]

    def join(self, partitions: Iterable[int]) -> int:
        """The coarsest partition that tells apart what any of them does."""
        return reduce(self.joined, partitions)

    def joined(self, a: int, b: int) -> int:
        """The join of two."""
        if a == b:
            return a
        pair = (a, b) if a < b else (b, a)
        found = self._pairs.get(pair)
        if found is None:
            both = self.codes[pair[0]] * self.n_classes(pair[1]) + self.codes[pair[1]]
            found = self._pairs[pair] = self.of(both)
        return found


@compiled
def _classes(codes: Codes) -> tuple[Codes, Codes]:
    """The class of every choice, and the first choice of every class."""
    classes, firsts, n = np.empty(len(codes), np.intp), np.empty(len(codes), np.intp), 0
    for k in range(len(codes)):
        c = 0
        while c < n and codes[firsts[c]] != codes[k]:
            c += 1
        if c == n:
            firsts[n] = k
            n += 1
        classes[k] = c
    return classes, firsts[:n].copy()
