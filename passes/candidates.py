"""Candidates: what each planning node may choose, and what each choice costs.

A group's choice is one joint strategy per active mesh axis; its time and memory factor over
axes (a tensor's local bytes are its bytes times one fraction per axis), so the tables are
outer products and nothing is priced twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.compute import Kind
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.factors import Operator
from autopar.facts import OperatorStrategy
from autopar.passes.constraints import Limits
from autopar.passes.groups import Group, JointStrategy, PlacedOperator
from autopar.passes.spec_column import SpecColumn
from autopar.rules import OpRule, rule_for
from autopar.rules.lowering import Lowering
from autopar.rules.pattern import AxisStrategy
from autopar.saved import Saved
from autopar.spec import PREFERENCE, I, Placement, Spec, TensorType, illegal_reason

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GroupCandidates:
    """The choices of one group; arrays are indexed by choice.

    `placements[c]` are the joint strategies of choice c, one per active axis.
    """

    group: Group
    choices: tuple[tuple[JointStrategy, ...], ...]
    active_axes: tuple[int, ...]
    n_axes: int
    time_s: Array
    size_bytes: Array
    preference: Array

    def spec(self, choice: int, value: str) -> Spec:
        placements = [I] * self.n_axes
        for axis, joint in zip(self.active_axes, self.choices[choice], strict=True):
            placements[axis] = joint.placements[value]
        return Spec(tuple(placements))

    def specs(self, value: str) -> SpecColumn:
        """How each choice places a value that the group touches."""
        if not self.active_axes:
            return SpecColumn.of([self.spec(0, value)])
        codes, kinds = [], []
        for k in range(len(self.active_axes)):
            numbers: dict[Placement, int] = {}
            of_axis = (joints[k].placements[value] for joints in self.choices)
            codes.append([numbers.setdefault(p, len(numbers)) for p in of_axis])
            kinds.append(len(numbers))
        joint = np.ravel_multi_index(codes, kinds)
        _, first, code = np.unique(joint, return_index=True, return_inverse=True)
        order = np.argsort(first)
        distinct = tuple(self.spec(int(c), value) for c in first[order])
        return SpecColumn(distinct, np.argsort(order)[code])

    def strategies(self, choice: int) -> dict[str, OperatorStrategy]:
        """Per operator of the group, its specs under a choice."""
        out = {}
        for position, item in enumerate(self.group.members):
            chosen = [item.strategies[j.members[position]] for j in self.choices[choice]]
            out[item.name] = OperatorStrategy(
                tuple(self.spec(choice, n) for n in item.operator.inputs),
                tuple(self.spec(choice, n) for n in item.operator.outputs),
                *lowered_over(chosen, self.active_axes),
            )
        return out


@dataclass(frozen=True)
class CandidateMaker:
    """Prices groups on one logical mesh.

    `n_in_flight` microbatches keep their activations at once; `n_splits` parts are what the
    rows of the graph make. Some operators stand for `n_like` alike in one group (`repeated.py`).
    """

    cost: CostModel
    types: Mapping[str, TensorType]
    saved: Mapping[str, Saved]
    limits: Limits
    n_microbatches: int
    n_in_flight: int
    n_splits: int
    n_like: Mapping[str, int] = field(default_factory=dict)

    def make(self, group: Group, first_savers: set[str]) -> GroupCandidates:
        """All legal choices of `group`; raises `InfeasibleError` when constraints leave none.

        `first_savers` collects values whose saving for backward is already charged.
        """
        sizes = self.cost.mesh.sizes
        active = self.cost.mesh.active_axes
        joints = group.strategies
        per_axis = [
            self.limits.preferred(
                group,
                axis,
                [j for j in self.limits.allowed(group, axis, joints) if self._divides(axis, j)],
            )
            for axis in active
        ]
        index = [
            picks
            for picks in itertools.product(*(range(len(js)) for js in per_axis))
            if self._legal(group, [per_axis[k][i] for k, i in enumerate(picks)], active, sizes)
        ]
        if not index:
            raise InfeasibleError(
                f"no allowed placement is left for operator {group.name}",
                hint="relax forbid, force or the recipe for the tensors it uses",
            )
        columns = [np.array([picks[k] for picks in index]) for k in range(len(active))]
        time, size_bytes = self._price(group, per_axis, active, columns, first_savers)
        preference = sum(
            (
                np.array([self._preference(j) for j in per_axis[k]])[columns[k]]
                for k in range(len(active))
            ),
            np.zeros(len(index)),
        )
        choices = tuple(tuple(per_axis[k][i] for k, i in enumerate(picks)) for picks in index)
        return GroupCandidates(group, choices, active, len(sizes), time, size_bytes, preference)

    def _divides(self, axis: int, joint: JointStrategy) -> bool:
        n = self.cost.mesh.sizes[axis]
        return all(
            self.types[name].dims[p.dim][p.factor] % n == 0
            for name, p in joint.placements.items()
            if p.is_shard
        )

    def _legal(
        self, group: Group, joints: Sequence[JointStrategy], active: Sequence[int],
        sizes: Sequence[int],
    ) -> bool:  # fmt: skip
        """Do factors that several axes split still divide, and is no operator replaced twice?"""
        if len(joints) < 2:
            return True
        for position, item in enumerate(group.members):
            chosen = [item.strategies[j.members[position]] for j in joints]
            if len({id(s.lowering) for s in chosen if s.lowering}) > 1:
                return False
        for name in joints[0].placements:
            placed = [j.placements[name] for j in joints]
            cells = [p.cell for p in placed if p.is_shard]
            if len(set(cells)) < len(cells):
                placements = [I] * len(sizes)
                for axis, p in zip(active, placed, strict=True):
                    placements[axis] = p
                if illegal_reason(self.types[name], Spec(tuple(placements)), sizes):
                    return False
        return True

    @staticmethod
    def _preference(joint: JointStrategy) -> float:
        return sum(PREFERENCE[p.kind] for p in joint.placements.values()) * 1e-5

    def _price(
        self, group: Group, per_axis: Sequence[Sequence[JointStrategy]], active: Sequence[int],
        columns: Sequence[NDArray[np.int64]], first_savers: set[str],
    ) -> tuple[Array, Array]:  # fmt: skip
        """Seconds per step and bytes kept for backward, per choice."""
        n_choices = len(columns[0]) if columns else 1

        def over_axes(fraction_of: list[list[float]]) -> Array:
            out = np.ones(n_choices)
            for k, column in enumerate(columns):
                out *= np.array(fraction_of[k])[column]
            return out

        fractions: dict[str, Array] = {}

        def fraction(value: str) -> Array:
            if value not in fractions:
                fractions[value] = over_axes(
                    [
                        [
                            1.0 / self.cost.mesh.sizes[axis]
                            if j.placements[value].is_shard
                            else 1.0
                            for j in per_axis[k]
                        ]
                        for k, axis in enumerate(active)
                    ]
                )
            return fractions[value]

        time, kept_bytes = np.zeros(n_choices), np.zeros(n_choices)
        for position, item in enumerate(group.members):
            labelled = over_axes(
                [
                    [
                        1.0 / self.cost.mesh.sizes[axis]
                        if item.strategies[j.members[position]].label
                        else 1.0
                        for j in per_axis[k]
                    ]
                    for k, axis in enumerate(active)
                ]
            )
            moved = sum(
                (
                    self.types[n].size_bytes * fraction(n)
                    for n in (*item.operator.inputs, *item.operator.outputs)
                ),
                np.zeros(n_choices),
            )
            rule = rule_for(str(item.operator.call.op))
            flops = rule.flops_of(item.sizes) * labelled
            forward, backward = operator_times_s(
                rule, item.operator, self.types, self.cost, flops, moved
            )
            n_like = self.n_like.get(item.name, 1)
            time += n_like * (forward + backward)
            if any(lowering.inner for lowering in rule.lower.values()):
                time += n_like * self._inner_time_s(item, position, per_axis, active, columns)
            kept_bytes += (
                self._kept_bytes(item, labelled, fraction, first_savers) * self.n_in_flight * n_like
            )
        return time * self.n_microbatches, kept_bytes

    def _inner_time_s(
        self, item: PlacedOperator, position: int,
        per_axis: Sequence[Sequence[JointStrategy]], active: Sequence[int],
        columns: Sequence[NDArray[np.int64]],
    ) -> Array:  # fmt: skip
        """The collectives inside a lowered operator, per choice."""
        itemsize = self.types[item.operator.inputs[0]].itemsize
        grads = [self.types[n].has_grad for n in item.operator.inputs]
        out = np.zeros(len(columns[0]) if columns else 1)
        for c in range(len(out)):
            joints = [per_axis[k][column[c]] for k, column in enumerate(columns)]
            chosen = [item.strategies[joint.members[position]] for joint in joints]
            lowering, axes = lowered_over(chosen, active)
            if lowering is None:
                continue
            sizes = dict(item.sizes)
            for axis, strategy in zip(active, chosen, strict=True):
                for label in (strategy.label or "").split():
                    sizes[item.pattern.names[label]] //= self.cost.mesh.sizes[axis]
            n_ranks = math.prod(self.cost.mesh.sizes[axis] for axis in axes)
            for inner in lowering.inner:
                if inner.runs(grads):
                    size_bytes = int(lowering.value(inner.size_bytes, sizes, itemsize, n_ranks))
                    out[c] += self.cost.primitive_time_s(inner.kind, size_bytes, axes)
        return out

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
            total = total / self.n_splits
        for name in names:
            if name not in first_savers and name not in self.limits.parameters:
                first_savers.add(name)
                total = total + self.types[name].size_bytes * fraction(name)
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
    rule: OpRule, operator: Operator, types: Mapping[str, TensorType], cost: CostModel,
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
    if not any(types[n].has_grad for n in operator.outputs):
        return forward, np.zeros_like(forward)
    if rule.flops is None:
        return forward, cost.op_times_s(flops, 1.5 * moved_bytes, kind)
    if rule.fused:
        return forward, cost.op_times_s(2.5 * flops, 2.0 * moved_bytes, kind, is_backward=True)
    n_products = sum(types[n].has_grad for n in operator.inputs[:2])
    return forward, n_products * cost.op_times_s(flops, moved_bytes)
