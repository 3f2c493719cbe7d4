"""What each operator of a planning node costs under each choice of the node.

Time and bytes factor over axes: a tensor's local bytes are its bytes times one fraction per axis. A
value that several operators save for backward is charged to the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, BoolArray, Indices
from autopar.cost.laws import CostModel, Kind
from autopar.measured import Saved
from autopar.passes.analysis import FusedTraffic, Neediest, OperatorGroup, PlacedOperator
from autopar.passes.intra.at_loss import AtLoss
from autopar.passes.intra.cases import Cases, array_of
from autopar.placement import PrimitiveKind, TensorType
from autopar.program.graph import Operator
from autopar.rules import AxisStrategy, Lowering, OpRule, rule_for

_NOTHING = np.zeros((1, 1))


@dataclass(frozen=True, eq=False)
class MemberPrice:
    """One operator of a group under each choice: every array is [cases, choices] or [1, 1].

    Seconds are of one microbatch; `again_s` is what running it again adds, `inner` ones are of the
    collectives inside the operator. Bytes are saved for backward: `own_bytes` besides values, and
    `kept` by the number of the value in its group, of storages that no operator saved before.
    `at_once_bytes` are what it needs when the first backward begins (`at_loss.py`).
    """

    forward_s: Array
    backward_s: Array
    again_s: Array
    inner_s: Array
    inner_backward_s: Array
    own_bytes: Array
    kept: Mapping[int, Array]
    at_once_bytes: Array

    @property
    def kept_bytes(self) -> Array:
        total = self.own_bytes
        for size_bytes in self.kept.values():
            total = total + size_bytes
        return total


@dataclass(frozen=True, eq=False)
class LoweredChoices:
    """The choices with which an operator is replaced by one function, over the same axes.

    at        the indices of these choices
    sizes     name of the notation -> its size on one rank, [cases, choices]
    n_ranks   [cases, 1]: ranks along the axes
    imbalance of rows: 1, if ranks compute equally many
    """

    lowering: Lowering
    axes: tuple[int, ...]
    at: Sequence[int]
    sizes: Mapping[str, Indices]
    n_ranks: Indices
    itemsize: int
    imbalance: float

    def values(self, formula: str) -> Array:
        """The values of a formula of the function: [cases, choices].

        Formulas may be of sizes that no choice cuts: dims of size 1 have no name.
        """
        on = self.sizes, self.itemsize, self.n_ranks, self.imbalance
        values = self.lowering.values(formula, *on)
        return np.broadcast_to(values, (len(self.n_ranks), len(self.at)))


@dataclass(frozen=True)
class MemberPricer:
    """Prices operators in several cases.

    `sizes_at` has, per number in `cases.distinct_counts`, operator -> the sizes of its names.
    `owners` maps views -> the values that own their storages (`Analysis.kept_owners`). `fused` has
    what operators of kernels move (`Analysis.fused_traffic`).
    """

    cases: Cases
    sizes_at: Sequence[Mapping[str, Mapping[str, int]]]
    saved: Mapping[str, Saved]
    owners: Mapping[str, str]
    batch_cells: Mapping[str, tuple[int, int]]
    parameters: Set[str]
    at_loss: AtLoss
    fused: Mapping[str, FusedTraffic]

    def members(
        self, group: OperatorGroup, picked: Indices, first_savers: set[str]
    ) -> Iterator[MemberPrice]:
        """The price of each operator of a group, under the choices of a table.

        `picked` [active axes, choices] are indices of the group's joint strategies. `first_savers`
        collects the owners of storages whose saving is charged.
        """
        shape = len(self.cases), picked.shape[1]
        shares: dict[bytes, Array] = {}

        def share(is_cut: BoolArray) -> Array:
            """The fraction of one rank: axes whose strategy `is_cut` [strategies] divide it."""
            key = is_cut.tobytes()
            if key not in shares:
                shares[key] = np.ones(shape)
                for axis, picks in zip(self.cases.active_axes, picked, strict=True):
                    n_ranks = self.cases.sizes[:, axis, None]
                    shares[key] /= np.where(is_cut[picks], n_ranks, 1)
            return shares[key]

        known: dict[str, Array] = {}

        def local_bytes(value: str) -> Array:
            if value not in known:
                of_rank = share(group.is_cut[group.number[value]])
                known[value] = self.cases.size_bytes(value)[:, None] * of_rank
            return known[value]

        for item, chosen in zip(group.members, group.chosen.T, strict=True):
            is_labelled = np.array([bool(strategy.label) for strategy in item.strategies])
            labelled = share(is_labelled[chosen])
            names = (*item.operator.inputs, *item.operator.outputs)
            moved = Moved.of(map(local_bytes, names), self.fused.get(item.name), np.zeros(shape))
            rule = rule_for(str(item.operator.call.op))
            flops = np.zeros(1)
            if rule.flops is not None:
                of_counts = [rule.flops_of(sizes[item.name]) for sizes in self.sizes_at]
                flops = array_of(self.cases, of_counts) * labelled
            lowered = self._lowered_choices(rule, item, chosen[picked])
            between = zip(*(rule.between_of(of[item.name]) for of in self.sizes_at), strict=True)
            item_bytes = self.cases.type(item.operator.inputs[0]).itemsize * labelled
            between_bytes = [item_bytes * array_of(self.cases, [*of]) for of in between]
            times = operator_times_s(
                rule, item.operator, self.cases.type, self.cases.costs[0], flops, moved,
                _rows_shares(lowered, shape) if rule.fused else 1.0, between_bytes,
            )  # fmt: skip
            for of in (of for of in lowered if of.imbalance != 1.0):
                times = times.slowed(of.at, of.imbalance)
            inner = self._inner_times_s(lowered, item, times)
            own_bytes = self._own_bytes(item, labelled)
            kept = self._kept_values(group, item, share, first_savers)
            at_once_bytes = _NOTHING
            neediest = self.at_loss.neediest
            if neediest is not None and item.name == neediest.operator:
                at_once_bytes = self._start_bytes(neediest, lowered, item, labelled, local_bytes)
            yield MemberPrice(*times, *inner, own_bytes, kept, at_once_bytes)

    def _lowered_choices(
        self, rule: OpRule, item: PlacedOperator, chosen: Indices
    ) -> tuple[LoweredChoices, ...]:
        """The choices with which an operator is replaced, by the function.

        `chosen` [active axes, choices] are indices of the operator's strategies.
        """
        if not rule.lower:
            return ()
        itemsize = self.cases.type(item.operator.inputs[0]).itemsize
        alike: dict[tuple[Lowering, tuple[int, ...]], list[int]] = {}
        for c, indices in enumerate(chosen.T.tolist()):
            strategies = [item.strategies[i] for i in indices]
            lowering, axes = joint_lowering(strategies, self.cases.active_axes)
            if lowering is not None:
                alike.setdefault((lowering, axes), []).append(c)
        sizes = self._local_sizes(item, chosen) if alike else {}
        return tuple(
            LoweredChoices(
                lowering, axes, at, {name: of[:, at] for name, of in sizes.items()},
                self.cases.sizes[:, axes].prod(axis=1)[:, None], itemsize,
                self.cases.costs[0].imbalance if lowering.uneven else 1.0,
            )
            for (lowering, axes), at in alike.items()
        )  # fmt: skip

    def _inner_times_s(
        self, lowered: Sequence[LoweredChoices], item: PlacedOperator, times: OperatorTimes
    ) -> tuple[Array, Array]:
        """(forward, backward) seconds that a lowered operator, which takes `times`, waits for its
        collectives.

        Results are [cases, choices], or [1, 1] if there are no collectives.
        """
        if not any(of.lowering.inner for of in lowered):
            return _NOTHING, _NOTHING
        compute_s = {"forward": times.forward_s, "backward": times.backward_s}
        time_s = {phase: np.zeros_like(own_s) for phase, own_s in compute_s.items()}
        grads = [self.cases.type(n).has_grad for n in item.operator.inputs]
        for of in lowered:
            for inner in of.lowering.inner:
                if inner.runs(grads):
                    size_bytes = of.values(inner.size_bytes)
                    inner_s = self._collective_times_s(inner.kind, size_bytes, of.axes)
                    inner_s *= of.values(inner.count) * of.imbalance
                    time_s[inner.phase][:, of.at] += inner_s
            share = of.values(of.lowering.beside) * self.cases.costs[0].hides
            exposed = 1.0 - of.values(of.lowering.hidden)
            for phase, own_s in compute_s.items():
                all_s = time_s[phase][:, of.at]
                waited_s = np.maximum(all_s - share * own_s[:, of.at], exposed * all_s)
                time_s[phase][:, of.at] = waited_s
        return time_s["forward"], time_s["backward"]

    def _local_sizes(self, item: PlacedOperator, chosen: Indices) -> dict[str, Indices]:
        """Name of the operator's notation -> its size on one rank, [cases, choices]."""
        n_shards = {
            name: np.ones((len(self.cases), chosen.shape[1]), dtype=np.int64) for name in item.sizes
        }
        names = [
            {item.pattern.names[label] for label in (strategy.label or "").split()}
            for strategy in item.strategies
        ]
        for name, n in n_shards.items():
            is_cut = np.array([name in of for of in names])
            for axis, of_axis in zip(self.cases.active_axes, chosen, strict=True):
                n *= np.where(is_cut[of_axis], self.cases.sizes[:, axis, None], 1)
        whole = [sizes[item.name] for sizes in self.sizes_at]
        return {
            name: np.array([of[name] for of in whole])[self.cases.count_of][:, None] // n
            for name, n in n_shards.items()
        }

    def _collective_times_s(
        self, kind: PrimitiveKind, size_bytes: Array, axes: tuple[int, ...]
    ) -> Array:
        """[cases, k]: seconds of a collective on `size_bytes`, rounded down to whole bytes."""
        time_s = np.empty_like(size_bytes)
        for i, cost in enumerate(self.cases.meshes):
            at = self.cases.mesh_of == i
            distinct, place = np.unique(size_bytes[at], return_inverse=True)
            found = [cost.primitive_time_s(kind, int(n), axes) for n in distinct.tolist()]
            time_s[at] = np.array(found)[place].reshape(size_bytes[at].shape)
        return time_s

    def _own_bytes(self, item: PlacedOperator, labelled: Array) -> Array:
        """Bytes saved besides values: [cases, choices], or [1, 1] if there are none."""
        saved = self.saved.get(item.name)
        if saved is None or not saved.other_bytes:
            return _NOTHING
        return self._rank_bytes(saved.other_bytes, item, labelled)

    def _start_bytes(
        self, neediest: Neediest, lowered: Sequence[LoweredChoices], item: PlacedOperator,
        labelled: Array, local_bytes: Callable[[str], Array],
    ) -> Array:  # fmt: skip
        """[cases, choices]: what the operator needs when backward begins.

        Forward it needs temporaries; backward gradients of its inputs as well. They are those of
        `passes/lowering/line_costs.py`.
        """
        needed = neediest.temporaries
        forward = self._rank_bytes(needed.forward_bytes, item, labelled)
        backward = self._rank_bytes(needed.backward_bytes, item, labelled)
        for of in lowered:
            for total, formula in (
                (forward, of.lowering.forward_bytes), (backward, of.lowering.backward_bytes)
            ):  # fmt: skip
                total[:, of.at] = of.values(formula) + total[:, of.at] * of.lowering.wraps
        for i in neediest.made:
            backward += local_bytes(item.operator.inputs[i])
        at_once: Array = np.maximum(forward, backward) - neediest.later_bytes
        return np.maximum(at_once, 0.0) * np.array(self.at_loss.needs)[:, None]

    def _rank_bytes(self, total_bytes: float, item: PlacedOperator, labelled: Array) -> Array:
        """[cases, choices]: one rank's part of bytes at the program's global shapes."""
        total = total_bytes * labelled
        batch = self.batch_cells
        if any(n in batch for n in item.operator.outputs + item.operator.inputs):
            of_counts = [self.cases.n_splits[m] for m in self.cases.distinct_counts]
            total = total / array_of(self.cases, of_counts)
        return total

    def _kept_values(
        self, group: OperatorGroup, item: PlacedOperator,
        share: Callable[[BoolArray], Array], first_savers: set[str],
    ) -> dict[int, Array]:  # fmt: skip
        """Number of a value in the group -> the bytes of its storage, if this operator is the first
        to save that."""
        saved, found = self.saved.get(item.name), dict[int, Array]()
        if saved is None:
            return found
        names = [item.operator.inputs[i] for i in sorted(saved.inputs)]
        names += [item.operator.outputs[i] for i in sorted(saved.outputs)]
        for name in names:
            owner = self.owners.get(name, name)
            if owner not in first_savers and owner not in self.parameters:
                first_savers.add(owner)
                of_rank = share(group.is_cut[group.number[name]])
                found[group.number[name]] = self.cases.size_bytes(owner)[:, None] * of_rank
        return found


def _rows_shares(lowered: Sequence[LoweredChoices], shape: tuple[int, int]) -> Array:
    """[cases, choices]: `rows_share` of `operator_times_s`.

    It is 1 where rows can be in head-tail order (`passes/lowering/head_tail.py`).
    """
    shares = np.ones(shape)
    for of in lowered:
        is_folded = (len(of.axes) == 1) & (of.sizes.get("c", 1) % 2 == 0)
        shares[:, of.at] = np.where(is_folded, 1.0, 1.0 / of.n_ranks)
    return shares


def joint_lowering(
    chosen: Sequence[AxisStrategy], axes: Sequence[int]
) -> tuple[Lowering | None, tuple[int, ...]]:
    """The function that replaces an operator with one strategy per axis, and the axes it
    communicates over. A legal choice has at most one such function."""
    found = [(s.lowering, axis) for s, axis in zip(chosen, axes, strict=True) if s.lowering]
    return (found[0][0] if found else None), tuple(axis for _, axis in found)


class Moved(NamedTuple):
    """Bytes that an operator reads and writes, forward, backward and again in backward, and its
    launches."""

    forward_bytes: Array
    backward_bytes: Array
    again_bytes: Array
    launches: tuple[int, int, int] = (1, 1, 1)

    @staticmethod
    def of(operand_bytes: Iterable[Array], fused: FusedTraffic | None, start: Array) -> Moved:
        """`operand_bytes` are of its inputs, then of its results, and `start` is zero.

        Alone, it touches every operand; its backward 1.5 times the bytes, with the gradients in and
        out. In a kernel with others, it moves what they do not.
        """
        if fused is None:
            moved = sum(operand_bytes, start=start)
            return Moved(moved, 1.5 * moved, moved)
        sizes = list(operand_bytes)
        forward, backward, again = (
            sum((share * n for share, n in zip(shares, sizes, strict=True)), start=start)
            for shares in (fused.forward, fused.backward, fused.again)
        )
        return Moved(forward, backward, again, fused.launches)


class OperatorTimes(NamedTuple):
    """Seconds of one operator in one microbatch; `again_s` is what running it again adds."""

    forward_s: Array
    backward_s: Array
    again_s: Array

    def slowed(self, at: Sequence[int], factor: float) -> OperatorTimes:
        """With the choices `at` that many times as slow."""
        factors = np.ones(self.forward_s.shape[-1])
        factors[at] = factor
        return OperatorTimes(*(time_s * factors for time_s in self))


def operator_times_s(
    rule: OpRule, operator: Operator, type_of: Callable[[str], TensorType], cost: CostModel,
    flops: Array, moved: Moved, rows_share: Array | float = 1.0,
    between_bytes: Sequence[Array] = (),
) -> OperatorTimes:  # fmt: skip
    """Seconds of one operator in one microbatch.

    The backward of a matmul has one matmul per input with gradient. The backward of fused attention
    has five matmuls for the forward's two, because it computes the scores again. Any other operator
    takes the time of what it moves.

    A causal kernel skips what is hidden: half of all pairs of queries and keys. Where rows of the
    query are cut, `rows_share` of them on each rank, the rank with the last rows skips least, and
    the others wait for it. Ranges of keys say which share of pairs they show; of documents of the
    batch, their lengths do. Where attention is in blocks of rows, its scores go to memory.

    `between_bytes` are those of `OpRule.between`. Kernels between matmuls take the time of what
    they move, and 1.5 times that in backward.
    """
    if rule.view:
        return OperatorTimes(*(np.zeros_like(moved.forward_bytes) for _ in range(3)))
    kind: Kind = "memory" if rule.flops is None else "attention" if rule.fused else "matmul"
    if rule.fused and operator.call.args.get("is_causal"):
        flops = flops * (1.0 - rows_share / 2)
    if rule.score_bytes:
        flops = flops * operator.call.args.get("seen", 1.0)
        if operator.call.args.get("documents"):
            flops = flops * cost.shown(operator.call.inputs[1][-2])
        width = operator.call.inputs[0][-1]  # two matmuls of so many multiply-adds per score
        score_bytes = rule.score_bytes * flops / (4 * width)
        moved = moved._replace(
            forward_bytes=moved.forward_bytes + score_bytes,
            again_bytes=moved.again_bytes + score_bytes,
        )
    if between_bytes:
        every_byte = moved.forward_bytes + between_bytes[0]
        moved = moved._replace(forward_bytes=every_byte, again_bytes=every_byte)
    moved_bytes = moved.forward_bytes
    n_forward, n_backward, n_again = moved.launches
    forward = cost.op_times_s(flops, moved_bytes, kind, n_launches=n_forward)
    again = forward
    if moved.again_bytes is not moved_bytes:
        again = cost.op_times_s(flops, moved.again_bytes, kind, n_launches=n_again)
    if not any(type_of(n).has_grad for n in operator.outputs):
        backward = np.zeros_like(forward)
    elif rule.flops is None:
        backward = cost.op_times_s(flops, moved.backward_bytes, kind, n_launches=n_backward)
    elif rule.fused:
        backward = cost.op_times_s(2.5 * flops, 2.0 * moved_bytes, kind, is_backward=True)
    else:
        n_matmuls = sum(type_of(n).has_grad for n in operator.inputs[:2])
        backward = n_matmuls * cost.op_times_s(flops, moved_bytes)
    if between_bytes:
        between_s = cost.op_times_s(np.zeros(1), between_bytes[1], "memory")
        has_grad = any(type_of(n).has_grad for n in operator.outputs)
        forward, backward = forward + between_s, backward + 1.5 * between_s * has_grad
        again = again + between_s
    return OperatorTimes(forward, backward, again)
