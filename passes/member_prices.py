"""What each operator of a planning node costs under the node's choices.

Time and bytes factor over axes: a tensor's local bytes are its bytes times one fraction per axis. A
value that several operators keep for backward is charged to the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.compute import Kind
from autopar.cost.model import CostModel
from autopar.factors import Operator
from autopar.passes.cases import Cases, array_of
from autopar.passes.groups import Group, JointStrategy, PlacedOperator
from autopar.rules import OpRule, rule_for
from autopar.rules.lowering import Lowering
from autopar.rules.pattern import AxisStrategy
from autopar.saved import Saved
from autopar.spec import TensorType

Array = NDArray[np.float64]
_NOTHING = np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class MemberPrice:
    """One operator of a group under each choice, [cases, choices] or [1, 1]: seconds of one
    microbatch, of collectives inside it apart, and bytes kept for backward: its own, and those of
    values that nobody kept before, by their numbers in the group."""

    forward_s: Array
    backward_s: Array
    inner_s: Array
    inner_backward_s: Array
    own_bytes: Array
    kept: Mapping[int, Array]

    @property
    def kept_bytes(self) -> Array:
        total = self.own_bytes
        for size_bytes in self.kept.values():
            total = total + size_bytes
        return total


@dataclass(frozen=True)
class MemberPricer:
    """Prices operators in several cases; `sizes_at` has their sizes by name, per distinct number of
    microbatches."""

    cases: Cases
    sizes_at: Sequence[Mapping[str, Mapping[str, int]]]
    saved: Mapping[str, Saved]
    batch_cells: Mapping[str, tuple[int, int]]
    parameters: Set[str]

    def members(
        self, group: Group, per_axis: Sequence[Sequence[JointStrategy]],
        columns: Sequence[NDArray[np.int64]], n_choices: int, first_savers: set[str],
    ) -> Iterator[MemberPrice]:  # fmt: skip
        """Of each operator of a group, under the choices that take of every active axis the joint
        strategy that its column says. `first_savers` collects values that are charged."""
        shares: dict[tuple[tuple[bool, ...], ...], Array] = {}

        def over_axes(is_cut: Callable[[JointStrategy], bool]) -> Array:
            """The share of a rank of what an axis divides where its strategy `is_cut`."""
            cuts = tuple(tuple(map(is_cut, joints)) for joints in per_axis)
            if cuts not in shares:
                out = np.ones((len(self.cases), n_choices))
                for axis, of_axis, column in zip(
                    self.cases.active_axes, cuts, columns, strict=True
                ):
                    if any(of_axis):
                        cut = np.array(of_axis, dtype=bool)[column]
                        out[:, cut] /= self.cases.sizes[:, axis, None]
                shares[cuts] = out
            return shares[cuts]

        known: dict[str, Array] = {}

        def local_bytes(value: str) -> Array:
            if value not in known:
                share = over_axes(lambda joint: joint.placements[value].is_shard)
                known[value] = self.cases.size_bytes(value)[:, None] * share
            return known[value]

        for position, item in enumerate(group.members):
            labels = [bool(strategy.label) for strategy in item.strategies]
            labelled = over_axes(lambda joint, p=position, of=labels: of[joint.members[p]])  # type: ignore[misc]
            names = (*item.operator.inputs, *item.operator.outputs)
            moved = sum(map(local_bytes, names), np.zeros((len(self.cases), n_choices)))
            rule = rule_for(str(item.operator.call.op))
            flops = np.zeros(1)
            if rule.flops is not None:
                of_counts = [rule.flops_of(sizes[item.name]) for sizes in self.sizes_at]
                flops = array_of(self.cases, of_counts) * labelled
            forward, backward = operator_times_s(
                rule, item.operator, self.cases.type, self.cases.costs[0], flops, moved
            )
            inner = self._inner_times_s(item, position, per_axis, columns)
            own_bytes = self._own_bytes(item, labelled)
            kept = self._kept_values(group, item, local_bytes, first_savers)
            yield MemberPrice(forward, backward, *inner, own_bytes, kept)

    def _inner_times_s(
        self, item: PlacedOperator, position: int,
        per_axis: Sequence[Sequence[JointStrategy]], columns: Sequence[NDArray[np.int64]],
    ) -> tuple[Array, Array]:  # fmt: skip
        """[cases, choices], or [1, 1] where there are none: the collectives inside a lowered
        operator, of forward and of backward."""
        rule = rule_for(str(item.operator.call.op))
        if not any(lowering.inner for lowering in rule.lower.values()):
            return _NOTHING, _NOTHING
        forward_s = np.zeros((len(self.cases), len(columns[0]) if columns else 1))
        backward_s = np.zeros_like(forward_s)
        for c in range(forward_s.shape[1]):
            joints = [per_axis[k][column[c]] for k, column in enumerate(columns)]
            chosen = [item.strategies[joint.members[position]] for joint in joints]
            lowering, axes = lowered_over(chosen, self.cases.active_axes)
            if lowering is not None:
                for b in range(len(self.cases)):
                    found = self._inner_in(b, item, chosen, lowering, axes)
                    forward_s[b, c], backward_s[b, c] = found
        return forward_s, backward_s

    def _inner_in(
        self, case: int, item: PlacedOperator, chosen: Sequence[AxisStrategy],
        lowering: Lowering, axes: Sequence[int],
    ) -> tuple[float, float]:  # fmt: skip
        """Seconds of a lowered operator's collectives in one case, forward and backward."""
        cost, types = self.cases.costs[case], [self.cases.type(n) for n in item.operator.inputs]
        itemsize, grads = types[0].itemsize, [t.has_grad for t in types]
        sizes = dict(self.sizes_at[self.cases.count_of[case]][item.name])
        for axis, strategy in zip(self.cases.active_axes, chosen, strict=True):
            for label in (strategy.label or "").split():
                sizes[item.pattern.names[label]] //= cost.mesh.sizes[axis]
        n_ranks = math.prod(cost.mesh.sizes[axis] for axis in axes)
        time_s = {"forward": 0.0, "backward": 0.0}
        for inner in lowering.inner:
            if inner.runs(grads):
                size_bytes = int(lowering.value(inner.size_bytes, sizes, itemsize, n_ranks))
                time_s[inner.phase] += cost.primitive_time_s(inner.kind, size_bytes, tuple(axes))
        return time_s["forward"], time_s["backward"]

    def _own_bytes(self, item: PlacedOperator, labelled: Array) -> Array:
        """Kept for backward besides values: [cases, choices], or [1, 1] where it is nothing."""
        saved = self.saved.get(item.name)
        if saved is None or not saved.other_bytes:
            return _NOTHING
        total = saved.other_bytes * labelled
        batch = self.batch_cells
        if any(n in batch for n in item.operator.outputs + item.operator.inputs):
            of_counts = [self.cases.n_splits[m] for m in self.cases.distinct_counts]
            total = total / array_of(self.cases, of_counts)
        return total

    def _kept_values(
        self, group: Group, item: PlacedOperator, local_bytes: Callable[[str], Array],
        first_savers: set[str],
    ) -> dict[int, Array]:  # fmt: skip
        """Bytes of the values that an operator is the first to keep."""
        saved, found = self.saved.get(item.name), dict[int, Array]()
        if saved is None:
            return found
        names = [item.operator.inputs[i] for i in sorted(saved.inputs)]
        names += [item.operator.outputs[i] for i in sorted(saved.outputs)]
        for name in names:
            if name not in first_savers and name not in self.parameters:
                first_savers.add(name)
                found[group.number[name]] = local_bytes(name)
        return found


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
