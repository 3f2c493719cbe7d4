"""The choices of each planning node, and what each of them costs.

A choice of a group is one joint strategy per active mesh axis. Time and memory factor over axes: a
tensor's local bytes are its bytes times one fraction per axis. So the tables are outer products and
nothing is priced twice. All cases (`cases.py`) have the same choices and are priced together. A
choice that is not legal in a case takes infinite time there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.caching import once
from autopar.errors import InfeasibleError
from autopar.passes.analysis import JointStrategy, OperatorGroup, PlacedOperator
from autopar.passes.intra.cases import Cases
from autopar.passes.intra.constraints import SPLIT_BATCH, AppliedConstraints
from autopar.passes.intra.member_prices import MemberPrice, MemberPricer, joint_lowering
from autopar.passes.reshard import SpecColumn, SpecColumns
from autopar.placement import PREFERENCE, I, Placement, Spec
from autopar.program.lines import OperatorStrategy


@dataclass(frozen=True, eq=False)
class ChoiceTable:
    """The choices of equal groups; values go by their numbers in `OperatorGroup.values`.

    `picked` [active axes, choices] are indices into the strategies of `first`, one of the groups.
    `legal`, `time_s` and `size_bytes` are [cases, choices]; `preference` is [choices]. `size_bytes`
    counts the values `saved`, and what operators save besides values.
    """

    first: OperatorGroup
    picked: Indices
    active_axes: tuple[int, ...]
    n_axes: int
    legal: BoolArray
    time_s: Array
    size_bytes: Array
    preference: Array
    saved: frozenset[int]
    known: SpecColumns

    def __len__(self) -> int:
        return self.picked.shape[1]

    @property
    def likeness(self) -> Hashable:
        """Equal for tables of one group with the same choices."""
        return self.picked.shape, self.picked.tobytes()

    @cached_property
    def choices(self) -> tuple[tuple[JointStrategy, ...], ...]:
        """[choices][active axes]: the joint strategies."""
        every = self.first.strategies
        return tuple(tuple(every[i] for i in of) for of in self.picked.T.tolist())

    @once
    def column(self, number: int) -> SpecColumn:
        """The spec of a value in each choice."""
        value = self.first.values[number]
        placements = tuple([joint.placements[value] for joint in self.first.strategies])
        key = (placements, self.likeness, self.active_axes, self.n_axes)
        return self.known.of(key, lambda: self._new_column(placements))

    def _new_column(self, placements: Sequence[Placement]) -> SpecColumn:
        """The column of a value that has `placements` in the joint strategies."""
        kinds: dict[Placement, int] = {}
        kind_of = np.array([kinds.setdefault(p, len(kinds)) for p in placements])
        joint = np.zeros(len(self), dtype=np.int64)
        for picks in self.picked:
            joint = joint * len(kinds) + kind_of[picks]
        numbers: dict[int, int] = {}
        code = [numbers.setdefault(j, len(numbers)) for j in joint.tolist()]
        every = tuple(kinds)

        def spec(joint: int) -> Spec:
            placements = [I] * self.n_axes
            for axis in reversed(self.active_axes):
                joint, kind = divmod(joint, len(every))
                placements[axis] = every[kind]
            return Spec(tuple(placements))

        return SpecColumn(tuple(map(spec, numbers)), np.array(code, dtype=np.int64))


@dataclass(frozen=True)
class GroupCandidates:
    """A group and its choices."""

    group: OperatorGroup
    table: ChoiceTable

    def __len__(self) -> int:
        return len(self.table)

    def specs(self, value: str) -> SpecColumn:
        """The spec of one of the group's values in each choice."""
        return self.table.column(self.group.number[value])

    def spec(self, choice: int, value: str) -> Spec:
        return self.specs(value)[choice]

    @once
    def strategies(self, choice: int) -> dict[str, OperatorStrategy]:
        """Operator of the group -> its strategy under a choice."""
        out = {}
        for position, item in enumerate(self.group.members):
            joints = self.table.choices[choice]
            chosen = [item.strategies[j.members[position]] for j in joints]
            out[item.name] = OperatorStrategy(
                tuple(self.spec(choice, n) for n in item.operator.inputs),
                tuple(self.spec(choice, n) for n in item.operator.outputs),
                *joint_lowering(chosen, self.table.active_axes),
            )
        return out


@dataclass(frozen=True)
class CandidateMaker:
    """Prices groups in several cases.

    n_like              operator -> how many equal ones it stands for in its group (`repeated.py`)
    tables_of_sizes     cached tables by `_likeness`, with the times of some machine of these sizes
    tables_of_machine   such a table -> the same table with the times of this machine
    columns             the spec columns of all problems of the program
    """

    pricer: MemberPricer
    limits: AppliedConstraints
    n_like: Mapping[str, int] = field(default_factory=dict)
    tables_of_machine: dict[ChoiceTable, ChoiceTable] = field(default_factory=dict)
    tables_of_sizes: dict[Hashable, ChoiceTable] = field(default_factory=dict)
    columns: SpecColumns = field(default_factory=SpecColumns)

    @property
    def cases(self) -> Cases:
        return self.pricer.cases

    @property
    def _active(self) -> tuple[int, ...]:
        return self.cases.active_axes

    def make(self, group: OperatorGroup, first_savers: set[str]) -> GroupCandidates:
        """All legal choices of `group`; raises `InfeasibleError` if the constraints leave none.

        `first_savers` collects the owners of storages whose saving for backward is already charged.
        """
        key = self._likeness(group, first_savers)
        placed = self.tables_of_sizes.get(key)
        if placed is None:
            placed = self.tables_of_sizes[key] = self._table(group, first_savers)
            self.tables_of_machine[placed] = placed
        elif placed not in self.tables_of_machine:
            self.tables_of_machine[placed] = self._reprice(placed, group, first_savers)
        table = self.tables_of_machine[placed]
        first_savers |= {self._owner(group.values[number]) for number in table.saved}
        return GroupCandidates(group, table)

    def _likeness(self, group: OperatorGroup, first_savers: Set[str]) -> Hashable:
        """All that decides a group's choices and costs.

        Types and batch positions are compared in one case; the other cases follow from them.
        """
        neediest = self.pricer.at_loss.neediest
        members = tuple(
            (
                self.pricer.saved.get(item.name), self.n_like.get(item.name, 1),
                self.pricer.fused.get(item.name),
                neediest if neediest and item.name == neediest.operator else None,
            )
            for item in group.members
        )  # fmt: skip
        values = tuple((self.limits.facts_of(n), n in first_savers) for n in group.values)
        owners = [self._owner(name) for name in group.values]
        views = tuple(
            (i, owners.index(owner), self.cases.type(owner), owner in first_savers)
            for i, owner in enumerate(owners)
            if owner != group.values[i]
        )
        return group.likeness, members, values, views

    def _owner(self, value: str) -> str:
        return self.pricer.owners.get(value, value)

    def _table(self, group: OperatorGroup, first_savers: Set[str]) -> ChoiceTable:
        factors = self._factors(group)
        fitting = [self._fitting_strategies(group, axis, factors) for axis in self._active]
        every = [np.flatnonzero(fits.any(axis=0)).tolist() for fits in fitting]
        products = list(itertools.product(*every))
        picked = np.array(products, dtype=np.int64).reshape(len(products), len(every)).T
        legal = self._legal(group, fitting, picked, factors)
        index = np.flatnonzero(legal.any(axis=0))
        if not len(index):
            raise self._no_placement(group)
        legal, picked = legal[:, index], np.ascontiguousarray(picked[:, index])
        time_s, size_bytes, saved = self._price(group, picked, set(first_savers))
        time_s[~legal] = np.inf
        preferences = np.array([self._preference(joint) for joint in group.strategies])
        preference = np.zeros(len(index))
        for picks in picked:
            preference += preferences[picks]
        return ChoiceTable(
            group, picked, self._active, self.cases.costs[0].mesh.n_axes,
            legal, time_s, size_bytes, preference, saved, self.columns,
        )  # fmt: skip

    def _no_placement(self, group: OperatorGroup) -> InfeasibleError:
        """The error that names rows that do not divide, if a recipe must split them."""
        role, cells = self.limits.constraints.role, self.limits.batch_cells
        n_ranks = math.prod(
            int(self.cases.sizes[0, axis]) for axis in self._active if role(axis) in SPLIT_BATCH
        )
        rows = [int(self.cases.factor(v, *cells[v])[0]) for v in group.values if v in cells]
        if rows and rows[0] % n_ranks:
            what = f"{rows[0]} rows of a microbatch do not divide over {n_ranks} ranks"
            return InfeasibleError(
                what, where=group.name, hint="use fewer microbatches, or less dp"
            )
        return InfeasibleError(
            f"no allowed placement is left for operator {group.name}",
            hint="relax forbid, force or the recipe for the tensors it uses",
        )

    def _reprice(
        self, table: ChoiceTable, group: OperatorGroup, first_savers: Set[str]
    ) -> ChoiceTable:
        """A table from another machine of the same sizes, with the times of this machine."""
        time_s, *_ = self._price(group, table.picked, set(first_savers))
        time_s[~table.legal] = np.inf
        return replace(table, time_s=time_s)

    def _factors(self, group: OperatorGroup) -> Indices:
        """[cases, factors]: the sizes of the factors that a group's strategies shard."""
        found = [self.cases.factor(*cut) for cut in group.cuts.factors]
        return np.array(found, dtype=np.int64).reshape(-1, len(self.cases)).T

    def _uneven_factors(
        self, group: OperatorGroup, axes: tuple[int, ...], factors: Indices
    ) -> tuple[BoolArray, BoolArray]:
        """The factors that the ranks of `axes` together do not divide in some case.

        Returns [cases, factors], in which cases they do not; and [strategies, factors], which
        strategies shard them.
        """
        n_shards = self.cases.sizes[:, axes].prod(axis=1)
        uneven = factors % n_shards[:, None] > 0
        some = uneven.any(axis=0)
        return uneven[:, some], group.cuts.marks[:, some]

    def _fitting_strategies(self, group: OperatorGroup, axis: int, factors: Indices) -> BoolArray:
        """[cases, strategies]: which strategies a group may use on one axis."""
        allowed = {id(j) for j in self.limits.allowed(group, axis, group.strategies)}
        uneven, marks = self._uneven_factors(group, (axis,), factors)
        fits = np.array([id(j) in allowed for j in group.strategies]) & ~(uneven @ marks.T)
        wanted: dict[bytes, BoolArray] = {}
        for row in fits:
            key = row.tobytes()
            if key not in wanted:
                fitting = [group.strategies[i] for i in np.flatnonzero(row)]
                ids = {id(j) for j in self.limits.preferred(group, axis, fitting)}
                wanted[key] = np.array([id(j) in ids for j in group.strategies])
            row[:] = wanted[key]
        return fits

    def _legal(
        self, group: OperatorGroup, fitting: Sequence[BoolArray], picked: Indices,
        factors: Indices,
    ) -> BoolArray:  # fmt: skip
        """[cases, choices]: every strategy fits its axis, factors that several axes shard divide,
        and no operator is replaced by two different functions."""
        legal = np.ones((len(self.cases), picked.shape[1]), dtype=bool)
        for fits, picks in zip(fitting, picked, strict=True):
            legal &= fits[:, picks]
        for n in range(2, len(picked) + 1):
            for some in itertools.combinations(range(len(picked)), n):
                axes = tuple(self._active[k] for k in some)
                uneven, marks = self._uneven_factors(group, axes, factors)
                shared = np.logical_and.reduce([marks[picked[k]] for k in some])
                legal &= ~(uneven @ shared.T)
        for item, chosen in zip(group.members, group.chosen.T, strict=True):
            if len(picked) > 1 and any(strategy.lowering for strategy in item.strategies):
                numbers = np.array([id(s.lowering) if s.lowering else 0 for s in item.strategies])
                replaced = numbers[chosen[picked]]
                most = replaced.max(axis=0)
                legal &= np.where(replaced > 0, replaced, most).min(axis=0) == most
        return legal

    @staticmethod
    def _preference(joint: JointStrategy) -> float:
        return sum(PREFERENCE[p.kind] for p in joint.placements.values()) * 1e-5

    def _price(
        self, group: OperatorGroup, picked: Indices, first_savers: set[str]
    ) -> tuple[Array, Array, frozenset[int]]:
        """[cases, choices]: seconds of a step, and bytes saved for backward by one microbatch, with
        what is needed at the loss. Last, the numbers of the values that are charged."""
        shape = len(self.cases), picked.shape[1]
        time_s, kept_bytes, saved = np.zeros(shape), np.zeros(shape), set[int]()
        prices = self.pricer.members(group, picked, first_savers)
        for item, price in zip(group.members, prices, strict=True):
            n_like = self.n_stood_for(item)
            time_s += n_like * (price.forward_s + price.backward_s)
            time_s += n_like * (price.inner_s + price.inner_backward_s)
            kept_bytes += n_like * price.kept_bytes + price.at_once_bytes
            saved |= price.kept.keys()
        return time_s * self.cases.n_microbatches[:, None], kept_bytes, frozenset(saved)

    def members(self, candidates: GroupCandidates) -> tuple[MemberPrice, ...]:
        """The price of each operator of a group; their `kept` is what the group is charged for."""
        group, table = candidates.group, candidates.table
        own = {self._owner(group.values[i]) for i in table.saved}
        charged = {self._owner(name) for name in group.values} - own
        return tuple(self.pricer.members(group, table.picked, charged))

    def n_stood_for(self, item: PlacedOperator) -> int:
        """The number of operators that one stands for in its group."""
        return self.n_like.get(item.name, 1)
