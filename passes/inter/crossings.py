"""What a value costs where it crosses a stage boundary: reshards and messages.

The producer's stage cuts the value into slices. The reader's stage reshards the slices to the specs
that its operators read. Both take the place of the reshards that one stage would make:

    leave     the cheapest reshard from the produced spec to a spec it may be sent in
    enter     the cheapest reshards from a spec it may be received in to all specs that are read,
              minus those from the produced spec to the same specs

The specs to send and receive are those of `boundary_specs` (`passes/analysis/cutting.py`).
Everything is computed for many meshes and sizes (cases) at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.analysis import Side, cuts, n_cut
from autopar.passes.reshard import ReshardTables, SpecColumn
from autopar.placement import Spec, local_bytes

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Codes = NDArray[np.intp]
# The numbers of `CrossingCosts.paid`: seconds to leave and to enter; the number of messages forward
# and their bytes; the same for gradients.
N_NUMBERS = 6


class PlacedBy(NamedTuple):
    """A variable, and the spec that each of its choices gives a value."""

    variable: int
    specs: SpecColumn


@dataclass(frozen=True, eq=False)
class CrossingCosts:
    """A value that crosses, in several cases: its producer, its readers and its reshards."""

    made: PlacedBy
    read: Sequence[PlacedBy]
    tables: ReshardTables

    def costs_of(self, cases: Codes, choices: Codes) -> Array:
        """[choices, `N_NUMBERS`]; `choices` is [choices, variables], `cases` is [choices]."""
        made = self.made.specs.code[choices[:, self.made.variable]]
        before_s, enter_s = np.zeros(len(cases)), np.zeros((len(cases), len(self._received.specs)))
        read = np.array([w[choices[:, r.variable]] for w, r in self._read_by], dtype=np.intp)
        for k, specs in enumerate(read):
            first = ~(read[:k] == specs).any(axis=0)  # a spec with several readers is made once
            before_s += np.where(first, self._kept_s[cases, made, specs], 0.0)
            enter_s += np.where(first[:, None], self._entering_s[cases, :, specs], 0.0)
        out = np.ones((len(cases), N_NUMBERS))
        out[:, 0] = self._leave_s[cases, made]
        out[:, 1] = enter_s.min(axis=1) - before_s
        out[:, 3] = self._slice_bytes[cases]
        out[:, 4:] = out[:, 2:4] * self.tables.tensors[0].has_grad
        return out

    @cached_property
    def _made(self) -> list[int]:
        return [self.tables.index[spec] for spec in self.made.specs.distinct]

    @cached_property
    def _read(self) -> dict[Spec, int]:
        """Every spec that some reader may ask for -> its number."""
        every = dict.fromkeys(itertools.chain(*(r.specs.distinct for r in self.read)))
        return {spec: i for i, spec in enumerate(every)}

    @cached_property
    def _read_by(self) -> list[tuple[Codes, PlacedBy]]:
        """Per reader, the number (`_read`) of the spec that each of its choices reads."""
        return [(r.specs.looked_up(self._read), r) for r in self.read]

    @cached_property
    def _sent(self) -> _CrossingSpecs:
        return _CrossingSpecs.of(self.tables, "sent")

    @cached_property
    def _received(self) -> _CrossingSpecs:
        return _CrossingSpecs.of(self.tables, "received")

    @cached_property
    def _leave_s(self) -> Array:
        """[cases, specs made]"""
        sent_s, _ = self.tables.between(self._made, self._sent.specs)
        least_s: Array = np.where(self._sent.legal[:, None], sent_s, np.inf).min(axis=2)
        return least_s

    @cached_property
    def _kept_s(self) -> Array:
        """[cases, specs made, specs read]"""
        return self.tables.between(self._made, self._targets)[0]

    @cached_property
    def _entering_s(self) -> Array:
        """[cases, specs received, specs read]"""
        read_s, _ = self.tables.between(self._received.specs, self._targets)
        return np.where(self._received.legal[:, :, None], read_s, np.inf)

    @property
    def _targets(self) -> list[int]:
        return [self.tables.index[spec] for spec in self._read]

    @cached_property
    def _slice_bytes(self) -> Array:
        """[cases]: bytes of one rank's slice, in the first legal spec to receive it in."""
        specs = self.tables.graph.specs
        firsts = (specs[self._received.specs[k]] for k in self._received.legal.argmax(axis=1))
        of_cases = zip(self.tables.tensors, firsts, self.tables.sizes, strict=True)
        return np.array([local_bytes(*of_case) for of_case in of_cases], dtype=np.float64)


class _CrossingSpecs(NamedTuple):
    """The specs that a value may cross in, in the order of `boundary_specs`.

    `specs` are indices into the specs of the reshard tables; `legal` is [cases, specs].
    """

    specs: list[int]
    legal: BoolArray

    @staticmethod
    def of(tables: ReshardTables, side: Side) -> _CrossingSpecs:
        every = cuts(tables.tensors[0], tables.sizes[0], side)
        at = np.array([tables.index[spec] for spec in every])
        n_axes = np.where(tables.legal[:, at], [n_cut(spec) for spec in every], -1)
        legal = n_axes == n_axes.max(axis=1, keepdims=True)
        used = legal.any(axis=0)
        return _CrossingSpecs(at[used].tolist(), legal[:, used])
