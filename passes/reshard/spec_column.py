"""How the choices of a variable place one value: a few distinct specs, and a code per choice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.arrays import BoolArray, Indices
from autopar.placement import Spec


@dataclass(frozen=True, eq=False)
class SpecColumn:
    """Choice c places the value as `distinct[code[c]]`."""

    distinct: tuple[Spec, ...]
    code: Indices

    @staticmethod
    def of(specs: Sequence[Spec]) -> SpecColumn:
        """One choice per spec."""
        numbers: dict[Spec, int] = {}
        code = [numbers.setdefault(spec, len(numbers)) for spec in specs]
        return SpecColumn(tuple(numbers), np.array(code, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.code)

    def __getitem__(self, choice: int) -> Spec:
        return self.distinct[self.code[choice]]

    def lookup(self, index: Mapping[Spec, int]) -> Indices:
        """The number in `index` of every choice's spec; `index` has them all."""
        return np.array([index[spec] for spec in self.distinct], dtype=np.int64)[self.code]

    def equals(self, other: SpecColumn) -> BoolArray:
        """[distinct specs here, distinct specs of `other`]: are they equal?"""
        alike = [[mine == theirs for theirs in other.distinct] for mine in self.distinct]
        return np.array(alike, dtype=bool)


@dataclass(eq=False)
class SpecColumns:
    """Columns by key; columns with equal distinct specs share one tuple of them."""

    _known: dict[Hashable, SpecColumn] = field(default_factory=dict)
    _distinct: dict[tuple[Spec, ...], tuple[Spec, ...]] = field(default_factory=dict)

    def of(self, key: Hashable, make: Callable[[], SpecColumn]) -> SpecColumn:
        """The column of a key, made on the first request."""
        found = self._known.get(key)
        if found is None:
            new = make()
            distinct = self._distinct.setdefault(new.distinct, new.distinct)
            found = self._known[key] = SpecColumn(distinct, new.code)
        return found


def all_alike(columns: Sequence[SpecColumn]) -> BoolArray:
    """[choices]: do all columns place the value alike? They are over the same choices."""
    first, *others = _numbers(columns)
    alike: BoolArray = np.logical_and.reduce([first == other for other in others])
    return alike


def _numbers(columns: Sequence[SpecColumn]) -> list[Indices]:
    """Per column, a number per choice; equal specs have equal numbers."""
    index: dict[Spec, int] = {}
    for column in columns:
        for spec in column.distinct:
            index.setdefault(spec, len(index))
    return [column.lookup(index) for column in columns]
