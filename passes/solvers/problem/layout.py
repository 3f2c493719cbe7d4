"""Where each number of a problem lies in its row.

A row holds every variable's own costs, then the entries of every table. Arrays of equal keys, as
those of equal blocks, share one place.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array

Shape = tuple[int, ...]
# Offset in a row -> array [problems or 1, ...].
ArraysByOffset = Mapping[int, Array]


@dataclass(frozen=True)
class Layout:
    """The offsets in a row: `own_at[v]` of variable v's own costs, `n_choices[v]` of them, and
    `table_at[t]` of table t, of shape `shapes[t]`. A row has `n_numbers` numbers."""

    own_at: tuple[int, ...]
    n_choices: tuple[int, ...]
    table_at: tuple[int, ...]
    shapes: tuple[Shape, ...]
    n_numbers: int

    @staticmethod
    def of(own: Sequence[Array], tables: Sequence[Array], keys: Iterable[Hashable]) -> Layout:
        """Lay out arrays [problems or 1, ...], those of variables first."""
        n_numbers, at, places = 0, dict[Hashable, int](), list[int]()
        for key, array in zip(keys, (*own, *tables), strict=True):
            if key not in at:
                at[key] = n_numbers
                n_numbers += array[0].size
            places.append(at[key])
        return Layout(
            tuple(places[: len(own)]),
            tuple(array.shape[1] for array in own),
            tuple(places[len(own) :]),
            tuple(table.shape[1:] for table in tables),
            n_numbers,
        )

    def placed(self, own: Sequence[Array | None], tables: Sequence[Array | None]) -> ArraysByOffset:
        """Offset -> array; None entries are left out."""
        arrays = zip((*self.own_at, *self.table_at), (*own, *tables), strict=True)
        return {at: array for at, array in arrays if array is not None}

    def rows(self, placed: ArraysByOffset, problem: int | None = None) -> Array:
        """[problems or 1, numbers]: the arrays at their offsets, zeros elsewhere; of one `problem`,
        if it is given."""
        if problem is not None:
            placed = {at: array[min(problem, len(array) - 1), None] for at, array in placed.items()}
        out = np.zeros((max(map(len, placed.values()), default=1), self.n_numbers))
        for at, array in placed.items():
            out[:, at : at + array[0].size] = array.reshape(len(array), -1)
        return out
