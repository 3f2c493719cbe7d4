"""Candidates: what each planning node may choose, and what each choice costs.

A group's choice is one joint strategy per active mesh axis; its time and memory factor over
axes (a tensor's local bytes are its bytes times one fraction per axis), so the tables are
outer products and nothing is priced twice. All cases (`cases.py`) have the same choices, and are
priced together: what is not legal in one of them takes forever there.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.facts import OperatorStrategy
from autopar.passes.cases import Cases
from autopar.passes.constraints import Limits
from autopar.passes.groups import Group, JointStrategy, PlacedOperator
from autopar.passes.member_prices import MemberPrice, MemberPricer, lowered_over
from autopar.passes.spec_column import SpecColumn
from autopar.rules.pattern import AxisStrategy
from autopar.saved import Saved
from autopar.spec import PREFERENCE, I, Placement, Spec

Array = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ChoiceTable:
    """What groups that are alike may choose; values go by their numbers in `Group.values`.

    `choices[c]` are the joint strategies of choice c in the `first` of the groups, one per active
    axis, and `picks[c]` their positions among all of its. `legal`, `time_s` and `size_bytes` are
    [cases, choices], `preference` [choices]. The bytes are those of the values `saved`, and of what
    is no value.
    """

    first: Group
    choices: tuple[tuple[JointStrategy, ...], ...]
    picks: tuple[tuple[int, ...], ...]
    active_axes: tuple[int, ...]
    n_axes: int
    legal: NDArray[np.bool_]
    time_s: Array
    size_bytes: Array
    preference: Array
    saved: frozenset[int]
    _columns: dict[int, SpecColumn] = field(default_factory=dict)

    def column(self, number: int) -> SpecColumn:
        """How each choice places a value."""
        if number not in self._columns:
            self._columns[number] = self._column(self.first.values[number])
        return self._columns[number]

    def _column(self, value: str) -> SpecColumn:
        def spec(choice: int) -> Spec:
            placements = [I] * self.n_axes
            for axis, joint in zip(self.active_axes, self.choices[choice], strict=True):
                placements[axis] = joint.placements[value]
            return Spec(tuple(placements))

        if not self.active_axes:
            return SpecColumn.of([spec(0)])
        numbers: dict[Placement, int] = {}
        placements = (joint.placements[value] for joint in self.first.strategies)
        of_strategies = np.array([numbers.setdefault(p, len(numbers)) for p in placements])
        kinds = (len(numbers),) * len(self.active_axes)
        joint = np.ravel_multi_index(tuple(of_strategies[self.picked]), kinds)
        _, first, code = np.unique(joint, return_index=True, return_inverse=True)
        order = np.argsort(first)
        distinct = tuple(spec(int(c)) for c in first[order])
        return SpecColumn(distinct, np.argsort(order)[code])

    @cached_property
    def picked(self) -> NDArray[np.int64]:
        """[axes, choices]: the picks."""
        return np.array(self.picks, dtype=np.int64).T


@dataclass(frozen=True)
class GroupCandidates:
    """A group and its choices."""

    group: Group
    table: ChoiceTable

    def __len__(self) -> int:
        return len(self.table.choices)

    def specs(self, value: str) -> SpecColumn:
        """How each choice places a value that the group touches."""
        return self.table.column(self.group.number[value])

    def spec(self, choice: int, value: str) -> Spec:
        return self.specs(value)[choice]

    def strategies(self, choice: int) -> dict[str, OperatorStrategy]:
        """Per operator of the group, its specs under a choice."""
        out = {}
        for position, item in enumerate(self.group.members):
            joints = self.table.choices[choice]
            chosen = [item.strategies[j.members[position]] for j in joints]
            out[item.name] = OperatorStrategy(
                tuple(self.spec(choice, n) for n in item.operator.inputs),
                tuple(self.spec(choice, n) for n in item.operator.outputs),
                *lowered_over(chosen, self.table.active_axes),
            )
        return out


@dataclass(frozen=True)
class CandidateMaker:
    """Prices groups in several cases.

    Some operators stand for `n_like` alike in one group (`repeated.py`). `sizes_at` has operators'
    sizes by name, per distinct number of microbatches. `elsewhere` keeps the choices of groups on
    some machine of the same sizes by all that decides them, `known` the same with this one's times.
    """

    cases: Cases
    sizes_at: Sequence[Mapping[str, Mapping[str, int]]]
    saved: Mapping[str, Saved]
    limits: Limits
    n_like: Mapping[str, int] = field(default_factory=dict)
    known: dict[int, ChoiceTable] = field(default_factory=dict)
    elsewhere: dict[Hashable, ChoiceTable] = field(default_factory=dict)
    _dividing: dict[tuple[tuple[int, ...], tuple[str, int, int]], NDArray[np.bool_]] = field(
        default_factory=dict, init=False
    )

    @property
    def _active(self) -> tuple[int, ...]:
        return self.cases.active_axes

    @cached_property
    def _pricer(self) -> MemberPricer:
        limits = self.limits
        return MemberPricer(
            self.cases, self.sizes_at, self.saved, limits.batch_cells, limits.parameters
        )

    def make(self, group: Group, first_savers: set[str]) -> GroupCandidates:
        """All legal choices of `group`; raises `InfeasibleError` when constraints leave none.

        `first_savers` collects values whose saving for backward is already charged.
        """
        key = self._likeness(group, first_savers)
        placed = self.elsewhere.get(key)
        if placed is None:
            placed = self.elsewhere[key] = self._table(group, first_savers)
            self.known[id(placed)] = placed
        elif id(placed) not in self.known:
            self.known[id(placed)] = self._repriced(placed, group, first_savers)
        table = self.known[id(placed)]
        first_savers |= {group.values[number] for number in table.saved}
        return GroupCandidates(group, table)

    def _likeness(self, group: Group, first_savers: Set[str]) -> Hashable:
        """All that decides a group's choices and costs: types in one case, and where their batch
        is, say them in all."""
        members = tuple(
            (self.saved.get(item.name), self.n_like.get(item.name, 1)) for item in group.members
        )
        values = tuple((self.limits.facts_of(n), n in first_savers) for n in group.values)
        return group.likeness, members, values

    def _table(self, group: Group, first_savers: Set[str]) -> ChoiceTable:
        fitting = [self._fitting(group, axis) for axis in self._active]
        per_axis = [joints for joints, _ in fitting]
        every = list(itertools.product(*(range(len(joints)) for joints in per_axis)))
        picks = np.array(every, dtype=np.int64).reshape(len(every), len(per_axis))
        legal = np.ones((len(self.cases), len(every)), dtype=bool)
        for (_, fits), column in zip(fitting, picks.T, strict=True):
            legal &= fits[:, column]
        replaced = [
            (position, item.strategies)
            for position, item in enumerate(group.members)
            if any(strategy.lowering for strategy in item.strategies)
        ]
        for c in np.flatnonzero(legal.any(axis=0)):
            (pick,) = _picked(per_axis, every[c : c + 1])
            legal[:, c] &= self._legal(pick, replaced)
        index = np.flatnonzero(legal.any(axis=0))
        if not len(index):
            raise InfeasibleError(
                f"no allowed placement is left for operator {group.name}",
                hint="relax forbid, force or the recipe for the tensors it uses",
            )
        columns, chosen = list(picks[index].T), [every[c] for c in index]
        savers = set(first_savers)
        time_s, size_bytes = self._price(group, per_axis, columns, len(index), savers)
        legal = legal[:, index]
        time_s[~legal] = np.inf
        preference = np.zeros(len(index))
        for joints, column in zip(per_axis, columns, strict=True):
            preference += np.array([self._preference(j) for j in joints])[column]
        position = {id(joint): i for i, joint in enumerate(group.strategies)}
        places = [[position[id(joint)] for joint in joints] for joints in per_axis]
        choices, positions = _picked(per_axis, chosen), _picked(places, chosen)
        saved = frozenset(group.number[name] for name in savers - set(first_savers))
        return ChoiceTable(
            group, choices, positions, self._active, self.cases.costs[0].mesh.n_axes,
            legal, time_s, size_bytes, preference, saved,
        )  # fmt: skip

    def _repriced(self, table: ChoiceTable, group: Group, first_savers: Set[str]) -> ChoiceTable:
        """The table of another machine of the same sizes, with the times of this one."""
        per_axis, columns = _over_axes(table, group)
        time_s, _ = self._price(group, per_axis, columns, len(table.choices), set(first_savers))
        time_s[~table.legal] = np.inf
        return replace(table, time_s=time_s)

    def _fitting(self, group: Group, axis: int) -> tuple[list[JointStrategy], NDArray[np.bool_]]:
        """What a group may do on one axis in some case; and [cases, strategies] in which."""
        allowed = self.limits.allowed(group, axis, group.strategies)
        divides = np.ones((len(self.cases), len(allowed)), dtype=bool)
        for i, joint in enumerate(allowed):
            for cut in joint.cuts:
                divides[:, i] &= self._divides((axis,), cut)
        wanted: dict[bytes, NDArray[np.bool_]] = {}
        rows = []
        for row in divides:
            if (key := row.tobytes()) not in wanted:
                dividing = [joint for joint, fits in zip(allowed, row, strict=True) if fits]
                ids = {id(j) for j in self.limits.preferred(group, axis, dividing)}
                wanted[key] = np.array([id(j) in ids for j in allowed], dtype=bool)
            rows.append(wanted[key])
        marks = np.array(rows, dtype=bool).reshape(len(self.cases), len(allowed))
        kept = np.flatnonzero(marks.any(axis=0))
        return [allowed[i] for i in kept], marks[:, kept]

    def _divides(self, axes: tuple[int, ...], cut: tuple[str, int, int]) -> NDArray[np.bool_]:
        """[cases]: do the ranks of axes together divide a factor of a value?"""
        if (axes, cut) not in self._dividing:
            n_shards = self.cases.sizes[:, axes].prod(axis=1)
            self._dividing[axes, cut] = self.cases.factor(*cut) % n_shards == 0
        return self._dividing[axes, cut]

    def _legal(
        self, joints: Sequence[JointStrategy],
        replaced: Sequence[tuple[int, Sequence[AxisStrategy]]],
    ) -> NDArray[np.bool_] | bool:  # fmt: skip
        """[cases]: do factors that several axes split still divide, and is no operator replaced
        twice? `replaced` are the members of the group that may be, and their strategies."""
        if len(joints) < 2:
            return True
        for position, strategies in replaced:
            chosen = [strategies[joint.members[position]].lowering for joint in joints]
            if len({id(lowering) for lowering in chosen if lowering}) > 1:
                return False
        legal: NDArray[np.bool_] | bool = True
        splits: dict[tuple[str, int, int], list[int]] = {}
        for axis, joint in zip(self._active, joints, strict=True):
            for cut in joint.cuts:
                splits.setdefault(cut, []).append(axis)
        for cut, axes in splits.items():
            if len(axes) > 1:
                legal = legal & self._divides(tuple(axes), cut)
        return legal

    @staticmethod
    def _preference(joint: JointStrategy) -> float:
        return sum(PREFERENCE[p.kind] for p in joint.placements.values()) * 1e-5

    def _price(
        self, group: Group, per_axis: Sequence[Sequence[JointStrategy]],
        columns: Sequence[NDArray[np.int64]], n_choices: int, first_savers: set[str],
    ) -> tuple[Array, Array]:  # fmt: skip
        """[cases, choices]: seconds per step, and bytes kept for backward by one microbatch."""
        shape = len(self.cases), n_choices
        time_s, kept_bytes = np.zeros(shape), np.zeros(shape)
        prices = self._pricer.members(group, per_axis, columns, n_choices, first_savers)
        for item, price in zip(group.members, prices, strict=True):
            n_like = self.n_stood_for(item)
            time_s += n_like * (price.forward_s + price.backward_s)
            time_s += n_like * (price.inner_s + price.inner_backward_s)
            kept_bytes += n_like * price.kept_bytes
        return time_s * self.cases.n_microbatches[:, None], kept_bytes

    def members(self, candidates: GroupCandidates) -> tuple[MemberPrice, ...]:
        """What each operator of a group costs, apart; `MemberPrice.kept` has what the group is
        charged with."""
        group, table = candidates.group, candidates.table
        per_axis, columns = _over_axes(table, group)
        charged = {name for i, name in enumerate(group.values) if i not in table.saved}
        return tuple(self._pricer.members(group, per_axis, columns, len(candidates), charged))

    def n_stood_for(self, item: PlacedOperator) -> int:
        """How many operators one stands for in its group."""
        return self.n_like.get(item.name, 1)


def _picked(
    per_axis: Sequence[Sequence[T]], picks: Sequence[tuple[int, ...]]
) -> tuple[tuple[T, ...], ...]:
    """What picks take of each axis."""
    return tuple(tuple(of[i] for of, i in zip(per_axis, pick, strict=True)) for pick in picks)


def _over_axes(
    table: ChoiceTable, group: Group
) -> tuple[list[list[JointStrategy]], list[NDArray[np.int64]]]:
    """Per active axis, the joint strategies of a group that choices take, and which each does."""
    per_axis, columns = [], []
    for picks in table.picked:
        distinct, column = np.unique(picks, return_inverse=True)
        per_axis.append([group.strategies[int(i)] for i in distinct])
        columns.append(column)
    return per_axis, columns
