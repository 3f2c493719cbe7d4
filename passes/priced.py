"""What problems of one program, and of parts of it, have in common: each is priced once.

Stages of a pipeline, and programs with few of their repeated blocks, consist of the same operators;
so do copies of a block. `Priced` keeps, for one machine, one number of microbatches and one set of
constraints, the choices of groups, the reshards and the conversions of parameters by what decides
them. Keys that are identities are of objects that it keeps.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.facts import Storage
from autopar.passes.candidates import ChoiceTable
from autopar.passes.parameters import ParameterMaker, Storages
from autopar.passes.reshard import ReshardTables, reshard_tables
from autopar.passes.spec_column import SpecColumn
from autopar.spec import Spec, TensorType

Array = NDArray[np.float64]


@dataclass(eq=False)
class Priced:
    """See the module. `groups` is filled by the `CandidateMaker`."""

    groups: dict[Hashable, ChoiceTable] = field(default_factory=dict)
    _tables: dict[tuple[TensorType, bool], ReshardTables] = field(default_factory=dict)
    _reshards: dict[tuple[int, int, int], Reshards] = field(default_factory=dict)
    _storages: dict[Hashable, Storages] = field(default_factory=dict)
    _conversions: dict[Hashable, Conversions] = field(default_factory=dict)

    def tables(
        self, maker: ParameterMaker, tensor: TensorType, no_reduce_scatter: bool
    ) -> ReshardTables:
        """All reshards of a tensor type."""
        key = (tensor, no_reduce_scatter)
        if key not in self._tables:
            self._tables[key] = reshard_tables(tensor, maker.costs, no_reduce_scatter)
        return self._tables[key]

    def reshards(
        self, tables: ReshardTables, made: SpecColumn, wanted: SpecColumn, n: int
    ) -> Reshards:
        """The seconds and ties of `n` microbatches between what two variables' choices say."""
        key = (id(tables), id(made), id(wanted))
        if key not in self._reshards:
            rows = [tables.index[spec] for spec in made.distinct]
            columns = [tables.index[spec] for spec in wanted.distinct]
            pick = np.ix_(np.arange(len(tables.time_s)), rows, columns)
            cost_s = tables.time_s[pick] * n
            tie = np.where(np.isfinite(cost_s), tables.tie[pick], 0.0) * n
            self._reshards[key] = Reshards(cost_s, tie, made, wanted)
        return self._reshards[key]

    def storages(
        self, maker: ParameterMaker, name: str, tensor: TensorType, used: tuple[Spec, ...]
    ) -> Storages:
        """How a parameter may be kept."""
        key = (tensor, used, maker.limits.facts_of(name))
        if key not in self._storages:
            self._storages[key] = maker.storages(name, tensor, used)
        return self._storages[key]

    def conversions(
        self, maker: ParameterMaker, tables: ReshardTables, storages: tuple[Storage, ...],
        uses: SpecColumn, n_uses: int,
    ) -> Conversions:  # fmt: skip
        """The seconds, ties and bytes of turning every storage into each of the specs used."""
        key = (id(tables), id(storages), id(uses), n_uses)
        if key not in self._conversions:
            found = maker.conversions(tables, storages, uses.distinct, n_uses)
            self._conversions[key] = Conversions(*found, storages, uses)
        return self._conversions[key]


@dataclass(frozen=True, eq=False)
class Reshards:
    """[meshes, specs of the producer, specs of the reader]; and whose they are."""

    cost_s: Array
    tie: Array
    made: SpecColumn
    wanted: SpecColumn


@dataclass(frozen=True, eq=False)
class Conversions:
    """[meshes, storages, specs of the reader]; and whose they are."""

    cost_s: Array
    tie: Array
    size_bytes: Array
    storages: tuple[Storage, ...]
    uses: SpecColumn

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.cost_s, self.tie, self.size_bytes
