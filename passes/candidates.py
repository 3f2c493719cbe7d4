"""Candidates: what each planning node may choose, and what each choice costs.

A group's choice is one joint strategy per active mesh axis; its time and memory factor over
axes (a tensor's local bytes are its bytes times one fraction per axis), so the tables are
outer products and nothing is priced twice. All cases (`cases.py`) have the same choices, and are
priced together: what is not legal in one of them takes forever there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.compute import Kind
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.factors import Operator
from autopar.facts import OperatorStrategy
from autopar.passes.cases import Cases, array_of
from autopar.passes.constraints import Limits
from autopar.passes.groups import Group, JointStrategy, PlacedOperator
from autopar.passes.spec_column import SpecColumn
from autopar.rules import OpRule, rule_for
from autopar.rules.lowering import Lowering
from autopar.rules.pattern import AxisStrategy
from autopar.saved import Saved
from autopar.spec import PREFERENCE, I, Placement, Spec, TensorType

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChoiceTable:
    """What groups that are alike may choose; values go by their numbers in `Group.values`.

    `choices[c]` are the joint strategies of choice c in the `first` of the groups, one per active
    axis, and `picks[c]` their positions among all of its. `time_s` and `size_bytes` are [cases,
    choices], `preference` [choices]. The bytes are those of the values `saved`, and of what is no
    value.
    """

    first: Group
    choices: tuple[tuple[JointStrategy, ...], ...]
    picks: tuple[tuple[int, ...], ...]
    active_axes: tuple[int, ...]
    n_axes: int
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
        codes, kinds = [], []
        for k in range(len(self.active_axes)):
            numbers: dict[Placement, int] = {}
            of_axis = (joints[k].placements[value] for joints in self.choices)
            codes.append([numbers.setdefault(p, len(numbers)) for p in of_axis])
            kinds.append(len(numbers))
        joint = np.ravel_multi_index(codes, kinds)
        _, first, code = np.unique(joint, return_index=True, return_inverse=True)
        order = np.argsort(first)
        distinct = tuple(spec(int(c)) for c in first[order])
        return SpecColumn(distinct, np.argsort(order)[code])


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
    sizes by name, per distinct number of microbatches. `known` keeps the choices of groups by all
    that decides them.
    """

    cases: Cases
    sizes_at: Sequence[Mapping[str, Mapping[str, int]]]
    saved: Mapping[str, Saved]
    limits: Limits
    n_like: Mapping[str, int] = field(default_factory=dict)
    known: dict[Hashable, ChoiceTable] = field(default_factory=dict)

    @property
    def _active(self) -> tuple[int, ...]:
        return self.cases.active_axes

    def make(self, group: Group, first_savers: set[str]) -> GroupCandidates:
        """All legal choices of `group`; raises `InfeasibleError` when constraints leave none.

        `first_savers` collects values whose saving for backward is already charged.
        """
        key = self._likeness(group, first_savers)
        if key not in self.known:
            self.known[key] = self._table(group, first_savers)
        table = self.known[key]
        first_savers |= {group.values[number] for number in table.saved}
        return GroupCandidates(group, table)

    def _likeness(self, group: Group, first_savers: Set[str]) -> Hashable:
        """All that decides a group's choices and costs."""
        number = group.number
        members = tuple(
            (
                item.operator.call.likeness,
                tuple(number[n] for n in item.operator.inputs),
                tuple(number[n] for n in item.operator.outputs),
                self.saved.get(item.name),
                self.n_like.get(item.name, 1),
            )
            for item in group.members
        )
        values = tuple(
            (self.cases.distinct_types(n), self.limits.facts_of(n), n in first_savers)
            for n in group.values
        )
        return members, values

    def _table(self, group: Group, first_savers: Set[str]) -> ChoiceTable:
        fitting = [self._fitting(group, axis) for axis in self._active]
        per_axis = [joints for joints, _ in fitting]
        picks = list(itertools.product(*(range(len(joints)) for joints in per_axis)))
        legal = np.ones((len(self.cases), len(picks)), dtype=bool)
        for c, pick in enumerate(picks):
            chosen = [per_axis[k][i] for k, i in enumerate(pick)]
            legal[:, c] = self._legal(group, chosen)
            for k, i in enumerate(pick):
                legal[:, c] &= fitting[k][1][:, i]
        index = np.flatnonzero(legal.any(axis=0))
        if not len(index):
            raise InfeasibleError(
                f"no allowed placement is left for operator {group.name}",
                hint="relax forbid, force or the recipe for the tensors it uses",
            )
        columns = [np.array([picks[c][k] for c in index]) for k in range(len(per_axis))]
        savers = set(first_savers)
        time_s, size_bytes = self._price(group, per_axis, columns, len(index), savers)
        time_s[~legal[:, index]] = np.inf
        preference = np.zeros(len(index))
        for joints, column in zip(per_axis, columns, strict=True):
            preference += np.array([self._preference(j) for j in joints])[column]
        choices = tuple(tuple(per_axis[k][i] for k, i in enumerate(picks[c])) for c in index)
        position = {id(joint): i for i, joint in enumerate(group.strategies)}
        positions = tuple(tuple(position[id(joint)] for joint in joints) for joints in choices)
        saved = frozenset(group.number[name] for name in savers - set(first_savers))
        return ChoiceTable(
            group, choices, positions, self._active, self.cases.costs[0].mesh.n_axes,
            time_s, size_bytes, preference, saved,
        )  # fmt: skip

    def _fitting(self, group: Group, axis: int) -> tuple[list[JointStrategy], NDArray[np.bool_]]:
        """What a group may do on one axis in some case; and [cases, strategies] in which."""
        allowed = self.limits.allowed(group, axis, group.strategies)
        divides = np.ones((len(self.cases), len(allowed)), dtype=bool)
        for i, joint in enumerate(allowed):
            divides[:, i] = self._divides(axis, joint)
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

    def _divides(self, axis: int, joint: JointStrategy) -> NDArray[np.bool_]:
        """[cases]: do the ranks of an axis divide what a strategy shards?"""
        cells = {(name, *p.cell) for name, p in joint.placements.items() if p.is_shard}
        out = np.ones(len(self.cases), dtype=bool)
        for cell in cells:
            out &= self.cases.factor(*cell) % self.cases.sizes[:, axis] == 0
        return out

    def _legal(self, group: Group, joints: Sequence[JointStrategy]) -> NDArray[np.bool_] | bool:
        """[cases]: do factors that several axes split still divide, and is no operator replaced
        twice?"""
        if len(joints) < 2:
            return True
        for position, item in enumerate(group.members):
            chosen = [item.strategies[j.members[position]] for j in joints]
            if len({id(s.lowering) for s in chosen if s.lowering}) > 1:
                return False
        legal: NDArray[np.bool_] | bool = True
        for name in joints[0].placements:
            splits: dict[tuple[int, int], list[int]] = {}
            for axis, joint in zip(self._active, joints, strict=True):
                placement = joint.placements[name]
                if placement.is_shard:
                    splits.setdefault(placement.cell, []).append(axis)
            for (dim, factor), axes in splits.items():
                if len(axes) > 1:
                    n_shards = self.cases.sizes[:, axes].prod(axis=1)
                    legal = legal & (self.cases.factor(name, dim, factor) % n_shards == 0)
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

        def over_axes(is_cut: Callable[[JointStrategy], bool]) -> Array:
            """The share of a rank of what an axis divides where its strategy `is_cut`."""
            out = np.ones(shape)
            for axis, joints, column in zip(self._active, per_axis, columns, strict=True):
                cut = np.array([is_cut(joint) for joint in joints], dtype=bool)[column]
                out[:, cut] /= self.cases.sizes[:, axis, None]
            return out

        fractions: dict[str, Array] = {}

        def fraction(value: str) -> Array:
            if value not in fractions:
                fractions[value] = over_axes(lambda joint: joint.placements[value].is_shard)
            return fractions[value]

        time_s, kept_bytes = np.zeros(shape), np.zeros(shape)
        for position, item in enumerate(group.members):
            labels = [bool(strategy.label) for strategy in item.strategies]
            labelled = over_axes(lambda joint, p=position, of=labels: of[joint.members[p]])  # type: ignore[misc]
            moved = np.zeros(shape)
            for name in (*item.operator.inputs, *item.operator.outputs):
                moved += self.cases.size_bytes(name)[:, None] * fraction(name)
            rule = rule_for(str(item.operator.call.op))
            flops = array_of(
                self.cases, [rule.flops_of(sizes[item.name]) for sizes in self.sizes_at]
            )
            forward, backward = operator_times_s(
                rule, item.operator, self.cases.type, self.cases.costs[0], flops * labelled, moved
            )
            n_like = self.n_like.get(item.name, 1)
            time_s += n_like * (forward + backward)
            if any(lowering.inner for lowering in rule.lower.values()):
                time_s += n_like * self._inner_time_s(item, position, per_axis, columns)
            kept_bytes += n_like * self._kept_bytes(item, labelled, fraction, first_savers)
        return time_s * self.cases.n_microbatches[:, None], kept_bytes

    def _inner_time_s(
        self, item: PlacedOperator, position: int,
        per_axis: Sequence[Sequence[JointStrategy]], columns: Sequence[NDArray[np.int64]],
    ) -> Array:  # fmt: skip
        """[cases, choices]: the collectives inside a lowered operator."""
        out = np.zeros((len(self.cases), len(columns[0]) if columns else 1))
        for c in range(out.shape[1]):
            joints = [per_axis[k][column[c]] for k, column in enumerate(columns)]
            chosen = [item.strategies[joint.members[position]] for joint in joints]
            lowering, axes = lowered_over(chosen, self._active)
            if lowering is not None:
                for b in range(len(self.cases)):
                    out[b, c] = self._inner_in(b, item, chosen, lowering, axes)
        return out

    def _inner_in(
        self, case: int, item: PlacedOperator, chosen: Sequence[AxisStrategy],
        lowering: Lowering, axes: Sequence[int],
    ) -> float:  # fmt: skip
        """Seconds of a lowered operator's collectives in one case."""
        cost, types = self.cases.costs[case], [self.cases.type(n) for n in item.operator.inputs]
        itemsize, grads = types[0].itemsize, [t.has_grad for t in types]
        sizes = dict(self.sizes_at[self.cases.count_of[case]][item.name])
        for axis, strategy in zip(self._active, chosen, strict=True):
            for label in (strategy.label or "").split():
                sizes[item.pattern.names[label]] //= cost.mesh.sizes[axis]
        n_ranks = math.prod(cost.mesh.sizes[axis] for axis in axes)
        time_s = 0.0
        for inner in lowering.inner:
            if inner.runs(grads):
                size_bytes = int(lowering.value(inner.size_bytes, sizes, itemsize, n_ranks))
                time_s += cost.primitive_time_s(inner.kind, size_bytes, tuple(axes))
        return time_s

    def _kept_bytes(
        self,
        item: PlacedOperator,
        labelled: Array,
        fraction: Callable[[str], Array],
        first_savers: set[str],
    ) -> Array:
        saved = self.saved.get(item.name)
        if saved is None:
            return np.zeros_like(labelled)
        names = [item.operator.inputs[i] for i in sorted(saved.inputs)]
        names += [item.operator.outputs[i] for i in sorted(saved.outputs)]
        batch = self.limits.batch_cells
        total = saved.other_bytes * labelled
        if any(n in batch for n in item.operator.outputs + item.operator.inputs):
            of_counts = [self.cases.n_splits[m] for m in self.cases.distinct_counts]
            total = total / array_of(self.cases, of_counts)
        for name in names:
            if name not in first_savers and name not in self.limits.parameters:
                first_savers.add(name)
                total = total + self.cases.size_bytes(name)[:, None] * fraction(name)
        return total


def lowered_over(
    chosen: Sequence[AxisStrategy], axes: Sequence[int]
) -> tuple[Lowering | None, tuple[int, ...]]:
    """What replaces an operator with one strategy per axis, and the axes it communicates over.

    Legal choices replace it by one function or none.
    """
    found = [(s.lowering, axis) for s, axis in zip(chosen, axes, strict=True) if s.lowering]
    return (found[0][0] if found else None), tuple(axis for _, axis in found)


def operator_times_s(
    rule: OpRule, operator: Operator, type_of: Callable[[str], TensorType], cost: CostModel,
    flops: Array, moved_bytes: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Forward and backward seconds of one operator in one microbatch.

    The backward of a contraction is one more of it per input with gradient; that of fused
    attention is five products for the forward's two, as it makes the scores again; that of any
    other operator touches its tensors once more, for the gradients in and out.
    """
    if rule.view:
        return np.zeros_like(moved_bytes), np.zeros_like(moved_bytes)
    kind: Kind = "memory" if rule.flops is None else "attention" if rule.fused else "product"
    forward = cost.op_times_s(flops, moved_bytes, kind)
    if not any(type_of(n).has_grad for n in operator.outputs):
        return forward, np.zeros_like(forward)
    if rule.flops is None:
        return forward, cost.op_times_s(flops, 1.5 * moved_bytes, kind)
    if rule.fused:
        return forward, cost.op_times_s(2.5 * flops, 2.0 * moved_bytes, kind, is_backward=True)
    n_products = sum(type_of(n).has_grad for n in operator.inputs[:2])
    return forward, n_products * cost.op_times_s(flops, moved_bytes)
