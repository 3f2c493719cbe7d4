"""What problems of one program, and of parts of it, have in common: each is priced once.

Stages of a pipeline, and programs with few of their repeated blocks, consist of the same operators;
so do copies of a block. `Priced` keeps, for some cases and one set of constraints, the choices of
groups, the reshards and the conversions of parameters by what decides them. Keys that are
identities are of objects that it keeps.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.facts import Storage
from autopar.passes.candidates import ChoiceTable
from autopar.passes.cases import Cases
from autopar.passes.parameters import ParameterMaker, Storages
from autopar.passes.reshard import ReshardTables, reshard_tables
from autopar.passes.spec_column import SpecColumn
from autopar.spec import Spec, TensorType

Array = NDArray[np.float64]


@dataclass(eq=False)
class Priced:
    """See the module. `groups` is filled by the `CandidateMaker`."""

    groups: dict[Hashable, ChoiceTable] = field(default_factory=dict)
    _tables: dict[Hashable, ReshardTables] = field(default_factory=dict)
    _reshards: dict[tuple[int, int, int], Reshards] = field(default_factory=dict)
    _storages: dict[Hashable, Storages] = field(default_factory=dict)
    _storage_costs: dict[Hashable, tuple[Array, Array, Array]] = field(default_factory=dict)
    _columns: dict[tuple[Spec, ...], SpecColumn] = field(default_factory=dict)
    _zeros: dict[int, Array] = field(default_factory=dict)
    _conversions: dict[Hashable, Conversions] = field(default_factory=dict)

    def tables(
        self, cases: Cases, value: str, is_parameter: bool, no_reduce_scatter: bool
    ) -> ReshardTables:
        """All reshards of a value in every case; of a parameter, on every distinct mesh."""
        key = (cases.distinct_types(value), is_parameter, no_reduce_scatter)
        if key not in self._tables:
            if is_parameter:
                tensors, costs = [cases.type(value)] * len(cases.meshes), cases.meshes
            else:
                types = cases.distinct_types(value)
                tensors, costs = [types[i] for i in cases.count_of], cases.costs
            self._tables[key] = reshard_tables(tensors, costs, no_reduce_scatter)
        return self._tables[key]

    def reshards(
        self, cases: Cases, tables: ReshardTables, made: SpecColumn, wanted: SpecColumn
    ) -> Reshards:
        """The seconds and ties of all microbatches between what two variables' choices say."""
        key = (id(tables), id(made), id(wanted))
        if key not in self._reshards:
            rows, columns = ([tables.index[s] for s in of.distinct] for of in (made, wanted))
            time_s, tie = tables.between(rows, columns)
            n = cases.n_microbatches[:, None, None]
            tie = np.where(np.isfinite(time_s), tie, 0.0)
            self._reshards[key] = Reshards(time_s * n, tie * n, made, wanted)
        return self._reshards[key]

    def column(self, specs: tuple[Spec, ...]) -> SpecColumn:
        """One choice per spec."""
        return self._columns.setdefault(specs, SpecColumn.of(specs))

    def zeros(self, n_choices: int) -> Array:
        """[1, choices] of a variable that costs nothing by itself."""
        return self._zeros.setdefault(n_choices, np.zeros((1, n_choices)))

    def equality(self, mine: SpecColumn, theirs: SpecColumn) -> Reshards:
        """Nothing between choices that place a value alike; others are not to be."""
        key = (0, id(mine), id(theirs))
        if key not in self._reshards:
            cost_s = np.where(mine.equals(theirs), 0.0, np.inf)[None]
            self._reshards[key] = Reshards(cost_s, np.zeros_like(cost_s), mine, theirs)
        return self._reshards[key]

    def storage_costs(
        self, maker: ParameterMaker, tensor: TensorType, storages: Storages
    ) -> tuple[Array, Array, Array]:
        """Seconds, ties and bytes of keeping a parameter: [cases or 1, storages]."""
        key = (tensor, id(storages))
        if key not in self._storage_costs:
            time_s, tie, size_bytes = maker.storage_costs(tensor, storages)
            self._storage_costs[key] = time_s, tie[None], size_bytes
        return self._storage_costs[key]

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
    """[cases, specs of the producer, specs of the reader]; and whose they are."""

    cost_s: Array
    tie: Array
    made: SpecColumn
    wanted: SpecColumn


@dataclass(frozen=True, eq=False)
class Conversions:
    """[cases, storages, specs of the reader]; and whose they are."""

    cost_s: Array
    tie: Array
    size_bytes: Array
    storages: tuple[Storage, ...]
    uses: SpecColumn

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.cost_s, self.tie, self.size_bytes
