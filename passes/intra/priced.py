"""Caches of what the problems of one program and of its parts share, so that each is priced once.

Stages of a pipeline, folded programs and equal blocks consist of the same operators. For some cases
and one set of constraints, `PlacedCosts` caches what may be chosen; machines of the same sizes
share it. `Priced` caches what it costs on one machine: choices of groups, reshards, and conversions
of parameters, each keyed by what decides it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import Array
from autopar.identity import Same
from autopar.passes.intra.at_loss import AtLoss
from autopar.passes.intra.candidates import ChoiceTable
from autopar.passes.intra.cases import Cases
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.hiding import Hidable, HidableCosts
from autopar.passes.intra.parameters import ParameterMaker, Storages, Uses
from autopar.passes.reshard import (
    ReshardTables,
    SpecColumn,
    SpecColumns,
    Ties,
    all_alike,
    reshard_tables,
)
from autopar.placement import Spec, TensorType
from autopar.program.lines import Storage


@dataclass(eq=False)
class PlacedCosts:
    """What may be chosen. The `CandidateMaker` fills `groups`, with the times of some machine."""

    groups: dict[Hashable, ChoiceTable] = field(default_factory=dict)
    _storages: dict[Hashable, Storages] = field(default_factory=dict)
    _columns: dict[tuple[Spec, ...], SpecColumn] = field(default_factory=dict)
    _pairs: dict[Hashable, tuple[SpecColumn, SpecColumn]] = field(default_factory=dict)
    _zeros: dict[int, Array] = field(default_factory=dict)
    _equal: dict[Hashable, Array] = field(default_factory=dict)

    def column(self, specs: tuple[Spec, ...]) -> SpecColumn:
        """A column with one choice per spec."""
        return self._columns.setdefault(specs, SpecColumn.of(specs))

    def pairs(
        self, first: tuple[Spec, ...], second: tuple[Spec, ...]
    ) -> tuple[SpecColumn, SpecColumn]:
        """Two columns with one choice per pair of specs."""
        key = (first, second)
        if key not in self._pairs:
            code, other = np.divmod(np.arange(len(first) * len(second)), len(second))
            self._pairs[key] = SpecColumn(first, code), SpecColumn(second, other)
        return self._pairs[key]

    def zeros(self, n_choices: int) -> Array:
        """[1, choices]: the zero costs of a variable."""
        return self._zeros.setdefault(n_choices, np.zeros((1, n_choices)))

    def equality(self, mine: SpecColumn, theirs: SpecColumn) -> Array:
        """Zero between choices that place a value alike, infinite between others."""
        key = (Same(mine.distinct), Same(theirs.distinct))
        if key not in self._equal:
            self._equal[key] = np.where(mine.equals(theirs), 0.0, np.inf)[None]
        return self._equal[key]

    def storages(
        self, maker: ParameterMaker, name: str, tensor: TensorType, used: tuple[Spec, ...]
    ) -> Storages:
        """The storages of a parameter that is used in the specs `used`."""
        key = (tensor, used, maker.limits.facts_of(name))
        if key not in self._storages:
            self._storages[key] = maker.storages(name, tensor, used)
        return self._storages[key]


@dataclass(eq=False)
class Priced:
    """What the choices cost on one machine. The `CandidateMaker` fills `groups`.

    All constraints share the tables of values. All cases on the same meshes share the tables of
    parameters.
    """

    placed: PlacedCosts
    value_tables: dict[Hashable, ReshardTables]
    parameter_tables: dict[Hashable, ReshardTables]
    groups: dict[ChoiceTable, ChoiceTable] = field(default_factory=dict)
    _reshards: dict[Hashable, Reshards] = field(default_factory=dict)
    _storage_costs: dict[Hashable, tuple[Array, Array, Array]] = field(default_factory=dict)
    _conversions: dict[Hashable, ConversionCosts] = field(default_factory=dict)

    def tables(
        self, cases: Cases, value: str, is_parameter: bool, no_reduce_scatter: bool, hides: bool
    ) -> ReshardTables:
        """The reshards of a value in every case; of a parameter, on every distinct mesh.

        `hides`: matmuls may hide them.
        """
        types = cases.distinct_types(value)
        known = self.parameter_tables if is_parameter else self.value_tables
        key = (types[0] if is_parameter else types, no_reduce_scatter, hides)
        if key not in known:
            if is_parameter:
                tensors, meshes = types[:1] * len(cases.meshes), np.arange(len(cases.meshes))
            else:
                tensors, meshes = tuple(types[i] for i in cases.count_of), cases.mesh_of
            costs = tuple(replace(cost, hides_tp=hides) for cost in cases.move_costs)
            known[key] = reshard_tables(tensors, costs, meshes, no_reduce_scatter)
        return known[key]

    def reshards(
        self, cases: Cases, tables: ReshardTables, made: SpecColumn, needed: SpecColumn
    ) -> Reshards:
        """Seconds and ties of a step's reshards between the choices of two variables."""
        key = (tables, Same(made.distinct), Same(needed.distinct))
        if key not in self._reshards:
            rows, columns = ([tables.index[s] for s in of.distinct] for of in (made, needed))
            time_s, tie = tables.between(rows, columns)
            n = cases.n_microbatches[:, None, None]
            time_s *= n
            tie *= n
            self._reshards[key] = Reshards(time_s, tie)
        return self._reshards[key]

    def storage_costs(
        self, maker: ParameterMaker, tensor: TensorType, storages: Storages
    ) -> tuple[Array, Array, Array]:
        """(seconds, ties, bytes) of storing a parameter: [cases or 1, storages]."""
        key = (tensor, Same(storages))
        if key not in self._storage_costs:
            time_s, tie, size_bytes = maker.storage_costs(tensor, storages)
            self._storage_costs[key] = time_s, tie[None], size_bytes
        return self._storage_costs[key]

    def conversions(
        self, maker: ParameterMaker, tables: ReshardTables, storages: tuple[Storage, ...],
        uses: SpecColumn, use: Uses,
    ) -> ConversionCosts:  # fmt: skip
        """Seconds, ties and bytes of converting every storage to every spec that is used."""
        key = (tables, Same(storages), Same(uses.distinct), use, maker.is_recipe)
        if key not in self._conversions:
            found = maker.conversions(tables, storages, uses.distinct, use)
            self._conversions[key] = ConversionCosts(*found)
        return self._conversions[key]

    def shared_conversions(
        self, maker: ParameterMaker, tables: ReshardTables, storages: tuple[Storage, ...],
        uses: tuple[SpecColumn, ...], each_use: tuple[Uses, ...],
    ) -> ConversionCosts:  # fmt: skip
        """The same for choices of several kinds of uses: [cases, storages, choices].

        If a choice places the parameter alike for all kinds, it is converted once.
        """
        key = (tables, Same(storages), uses, each_use, maker.is_recipe)
        if key not in self._conversions:
            alike = all_alike(uses)
            all_uses = each_use[0]._replace(
                n=sum(use.n for use in each_use), n_again=sum(use.n_again for use in each_use),
                stays=any(use.stays for use in each_use),
            )  # fmt: skip
            together = self.conversions(maker, tables, storages, uses[0], all_uses)
            apart = [
                self.conversions(maker, tables, storages, column, use)
                for column, use in zip(uses, each_use, strict=True)
            ]

            def joined(shared: NDArray[Any], each: Sequence[NDArray[Any]]) -> NDArray[Any]:
                total = sum(array[..., c.code] for array, c in zip(each, uses, strict=True))
                return np.where(alike, shared[..., uses[0].code], total)

            def hidable(case: int) -> Hidable:
                each = [of.hidable(case) for of in apart]
                one = together.hidable(case)
                return Hidable(*(joined(a, b) for a, *b in zip(one, *each, strict=True)))

            arrays = zip(together.arrays, *(of.arrays for of in apart), strict=True)
            cost_s, tie, size_bytes = (joined(shared, each) for shared, *each in arrays)
            self._conversions[key] = ConversionCosts(cost_s, tie, size_bytes, hidable)
        return self._conversions[key]


@dataclass(frozen=True, eq=False)
class Reshards:
    """Costs of reshards: [cases, specs made, specs needed]."""

    cost_s: Array
    tie: Ties


@dataclass(frozen=True, eq=False)
class ConversionCosts:
    """Costs of conversions: [cases, storages, specs or choices of uses]. `hidable` has what of the
    seconds compute may hide, in one case."""

    cost_s: Array
    tie: Ties
    size_bytes: Array
    hidable: HidableCosts

    @property
    def arrays(self) -> tuple[Array, Ties, Array]:
        return self.cost_s, self.tie, self.size_bytes


@dataclass(eq=False)
class Prices:
    """What the problems of one program and of its parts share, for as long as one planning lasts.

    The planner makes it, and it is gone with the planner.
    """

    columns: SpecColumns = field(default_factory=SpecColumns)
    _placed: dict[Hashable, PlacedCosts] = field(default_factory=dict)
    _values: dict[Hashable, dict[Hashable, ReshardTables]] = field(default_factory=dict)
    _parameters: dict[Hashable, dict[Hashable, ReshardTables]] = field(default_factory=dict)
    _priced: dict[Hashable, Priced] = field(default_factory=dict)

    def of(self, cases: Cases, constraints: Constraints, optimizer: str, at_loss: AtLoss) -> Priced:
        """The prices of some cases."""
        limits = repr(constraints), at_loss.needs, at_loss.gradients
        meshes = cases.move_costs
        sizes = tuple((cost.mesh.sizes, m) for cost, m in cases.every)
        alike = meshes, tuple(cases.mesh_of.tolist()), cases.counts
        key = alike, tuple(cost.bucket_bytes for cost in cases.costs), limits, optimizer
        if key not in self._priced:
            self._priced[key] = Priced(
                self._placed.setdefault((sizes, limits), PlacedCosts()),
                self._values.setdefault(alike, {}),
                self._parameters.setdefault(meshes, {}),
            )
        return self._priced[key]
