"""What crosses a boundary of stages: what is paid for placing it there, and its messages.

A value is cut into slices after its producer, which the stage that reads it turns into what its
operators want, in place of what the producer made:

    leave     the cheapest reshard of what was made to a way to send it
    enter     the cheapest of a way to receive it to all that is wanted, less what was made to that

The ways are `boundary_specs`; all of it is of many meshes and sizes at once.
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
# What `CrossingCosts.paid` lists of a value: seconds of leaving and entering; then how many
# messages of values there are and their bytes, and the same of gradients.
N_NUMBERS = 6


class PlacedBy(NamedTuple):
    """A variable, and how its choices place a value."""

    variable: int
    specs: SpecColumn


@dataclass(frozen=True, eq=False)
class CrossingCosts:
    """A value that crosses, in several cases: who makes and reads it, and its reshards."""

    made: PlacedBy
    read: Sequence[PlacedBy]
    tables: ReshardTables

    def paid(self, cases: Codes, choices: Codes) -> Array:
        """[choices, `N_NUMBERS`] of choices [choices, variables], each in the case at `cases`."""
        made = self.made.specs.code[choices[:, self.made.variable]]
        before_s, enter_s = np.zeros(len(cases)), np.zeros((len(cases), len(self._received.specs)))
        wanted = np.array([w[choices[:, r.variable]] for w, r in self._wanted_by], dtype=np.intp)
        for k, specs in enumerate(wanted):
            first = ~(wanted[:k] == specs).any(axis=0)  # what several want is made once
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
    def _wanted(self) -> dict[Spec, int]:
        """All specs that anyone reads the value as, numbered."""
        every = dict.fromkeys(itertools.chain(*(r.specs.distinct for r in self.read)))
        return {spec: i for i, spec in enumerate(every)}

    @cached_property
    def _wanted_by(self) -> list[tuple[Codes, PlacedBy]]:
        """Per reader, which of the wanted specs each of its choices wants."""
        return [(r.specs.looked_up(self._wanted), r) for r in self.read]

    @cached_property
    def _sent(self) -> _Cuts:
        return _Cuts.of(self.tables, "sent")

    @cached_property
    def _received(self) -> _Cuts:
        return _Cuts.of(self.tables, "received")

    @cached_property
    def _leave_s(self) -> Array:
        """[cases, specs made]"""
        sent_s, _ = self.tables.between(self._made, self._sent.specs)
        least_s: Array = np.where(self._sent.legal[:, None], sent_s, np.inf).min(axis=2)
        return least_s

    @cached_property
    def _kept_s(self) -> Array:
        """[cases, specs made, specs wanted]"""
        return self.tables.between(self._made, self._targets)[0]

    @cached_property
    def _entering_s(self) -> Array:
        """[cases, specs received, specs wanted]"""
        read_s, _ = self.tables.between(self._received.specs, self._targets)
        return np.where(self._received.legal[:, :, None], read_s, np.inf)

    @property
    def _targets(self) -> list[int]:
        return [self.tables.index[spec] for spec in self._wanted]

    @cached_property
    def _slice_bytes(self) -> Array:
        """[cases]: of a rank, in the first of the ways to receive it."""
        specs = self.tables.graph.specs
        firsts = (specs[self._received.specs[k]] for k in self._received.legal.argmax(axis=1))
        of_cases = zip(self.tables.tensors, firsts, self.tables.sizes, strict=True)
        return np.array([local_bytes(*of_case) for of_case in of_cases], dtype=np.float64)


class _Cuts(NamedTuple):
    """How a value may be cut where it crosses: places among the specs of its reshards, in the order
    of `boundary_specs`; [cases, specs]: is it one of them in each case?"""

    specs: list[int]
    legal: BoolArray

    @staticmethod
    def of(tables: ReshardTables, side: Side) -> _Cuts:
        every = cuts(tables.tensors[0], tables.sizes[0], side)
        at = np.array([tables.index[spec] for spec in every])
        n_axes = np.where(tables.legal[:, at], [n_cut(spec) for spec in every], -1)
        legal = n_axes == n_axes.max(axis=1, keepdims=True)
        used = legal.any(axis=0)
        return _Cuts(at[used].tolist(), legal[:, used])
