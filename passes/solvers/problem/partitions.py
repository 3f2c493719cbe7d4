"""Partitions of a variable's choices into classes that a table does not distinguish.

Tables over specs distinguish few classes of choices. Elimination needs the *join* of the partitions
of all tables that mention a variable, their coarsest common refinement: two choices are in one
class if they are in one class of every partition (`Partitions.join`). Equal partitions get one
number. Classes are numbered in the order of their first choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from autopar.arrays import Codes
from autopar.caching import once
from autopar.passes.solvers.problem.machine_code import compiled


@dataclass(eq=False)
class Partitions:
    """Numbered partitions: `codes[p][k]` is the class of choice k in partition p, `firsts[p][c]`
    the first choice of class c."""

    codes: list[Codes] = field(default_factory=list)
    firsts: list[Codes] = field(default_factory=list)
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _exact: dict[bytes, int] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, codes: Codes) -> int:
        """The number of the partition into choices of equal code."""
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
        """A number for exactly these codes. Equal arrays share it; two codings of one partition do
        not."""
        return self._exact.setdefault(codes.astype(np.intp, copy=False).tobytes(), len(self._exact))

    def singletons(self, n_choices: int) -> int:
        """The partition with every choice in a class of its own."""
        return self.of(np.arange(n_choices))

    def one_class(self, n_choices: int) -> int:
        """The partition with all choices in one class."""
        return self.of(np.zeros(n_choices, dtype=np.intp))

    def n_classes(self, partition: int) -> int:
        return len(self.firsts[partition])

    @once
    def grouped(self, partition: int) -> tuple[Codes, Codes]:
        """(the choices sorted by class, where each class begins among them)."""
        order = np.argsort(self.codes[partition], kind="stable")
        every = np.arange(self.n_classes(partition))
        return order, np.searchsorted(self.codes[partition][order], every)

    def join(self, partitions: Iterable[int]) -> int:
        """The coarsest partition that distinguishes whatever any of these does."""
        return reduce(self.joined, partitions)

    def joined(self, a: int, b: int) -> int:
        """The join of two partitions."""
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
    """(the class of every choice, the first choice of every class)."""
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
