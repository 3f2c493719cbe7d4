"""Planning nodes: groups of operators that are placed together.

A light operator has no flops and no lowering of its own: views, elementwise, norms (`is_light`). It
joins a group of light operators if all its computed inputs come from that group. A reshard never
pays inside such a group, because the tensors inside are as large as those at its edges. So rotary
embeddings, GELU written with primitives and RMSNorm become single nodes. That keeps the elimination
width of a transformer at 2 to 3; with primitives as nodes, rotary alone makes it 5. All other
operators stand alone, because partial sums arise there and reshards pay there.

Within a group, placements agree on every internal edge. So its strategies on one axis are the joins
of its operators' strategies.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from autopar.arrays import BoolArray, Indices
from autopar.identity import Same
from autopar.placement import Placement, TensorType
from autopar.program.graph import Operator, Program, name_sizes
from autopar.rules import AxisStrategy, Pattern, axis_strategies, resolve, rule_for


@dataclass(frozen=True)
class PlacedOperator:
    """An operator with the names of its notation mapped to the factors of its tensors."""

    operator: Operator
    pattern: Pattern
    sizes: Mapping[str, int]
    strategies: tuple[AxisStrategy, ...]

    @property
    def name(self) -> str:
        return self.operator.name

    def of(self, operator: Operator) -> PlacedOperator:
        """The same facts about an equal operator."""
        return PlacedOperator(operator, self.pattern, self.sizes, self.strategies)


@dataclass(frozen=True)
class JointStrategy:
    """A group's placements on one axis: per value its placement, and per operator the index of its
    strategy."""

    placements: Mapping[str, Placement]
    members: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Cuts:
    """`marks` [strategies, factors] says which `factors` (value, dim, factor) each strategy of a
    group shards."""

    factors: tuple[tuple[str, int, int], ...]
    marks: BoolArray


@dataclass(frozen=True)
class OperatorGroup:
    """A planning node. `inputs` are made outside, `outputs` are used outside."""

    members: tuple[PlacedOperator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.members[0].name

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Every value it touches, in order of first appearance. Equal groups have equal values at
        equal positions."""
        operators = (item.operator for item in self.members)
        return tuple(dict.fromkeys(n for o in operators for n in (*o.inputs, *o.outputs)))

    @cached_property
    def number(self) -> Mapping[str, int]:
        """Value -> its position in `values`."""
        return {name: i for i, name in enumerate(self.values)}

    @cached_property
    def likeness(self) -> Hashable:
        """Equal for equal groups: its operators, their types, and which values each one touches."""
        number = self.number
        return tuple(
            (
                Same(item.pattern),  # equal operators share one (`place_operators`)
                tuple(number[n] for n in item.operator.inputs),
                tuple(number[n] for n in item.operator.outputs),
            )
            for item in self.members
        )

    @cached_property
    def strategies(self) -> tuple[JointStrategy, ...]:
        """All ways to place the group on one axis with no reshard inside it."""
        partial: list[tuple[dict[str, Placement], tuple[int, ...]]] = [({}, ())]
        for item in self.members:
            partial = [
                (known | added, (*chosen, index))
                for known, chosen in partial
                for index, added in _consistent(item, known)
            ]
        return tuple(JointStrategy(known, chosen) for known, chosen in partial)

    @cached_property
    def chosen(self) -> Indices:
        """[strategies, members]: the index of each operator's strategy."""
        return np.array([joint.members for joint in self.strategies], dtype=np.int64)

    @cached_property
    def cuts(self) -> Cuts:
        """Which factors its strategies shard."""
        each = [
            [(name, *p.cell) for name, p in joint.placements.items() if p.is_shard]
            for joint in self.strategies
        ]
        number = {cut: k for k, cut in enumerate(dict.fromkeys(chain.from_iterable(each)))}
        marks = np.zeros((len(each), len(number)), dtype=bool)
        for row, cuts in zip(marks, each, strict=True):
            row[[number[cut] for cut in cuts]] = True
        return Cuts(tuple(number), marks)

    @cached_property
    def is_cut(self) -> BoolArray:
        """[values, strategies]: which values each strategy shards."""
        found = np.zeros((len(self.values), len(self.strategies)), dtype=bool)
        for (name, _, _), marks in zip(self.cuts.factors, self.cuts.marks.T, strict=True):
            found[self.number[name]] |= marks
        return found


def place_operators(
    operators: Iterable[Operator],
    types: Mapping[str, TensorType],
    known: dict[Hashable, PlacedOperator] | None = None,
) -> tuple[PlacedOperator, ...]:
    """Resolve every operator's notation and list its strategies on one axis.

    Equal operators are resolved once; `known` caches them between calls.
    """
    known = {} if known is None else known
    out: list[PlacedOperator] = []
    for operator in operators:
        inputs = tuple(types[n] for n in operator.inputs)
        outputs = tuple(types[n] for n in operator.outputs)
        key = (operator.likeness, inputs, outputs)
        alike = known.get(key)
        if alike is None:
            alike = known[key] = _placed(operator, inputs, outputs)
        out.append(alike.of(operator))
    return tuple(out)


def _placed(
    operator: Operator, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> PlacedOperator:
    sizes = name_sizes(operator.notation, [t.shape for t in inputs], [t.shape for t in outputs])
    pattern = resolve(operator.notation, inputs, outputs, sizes)
    grads = [t.has_grad for t in inputs], [t.has_grad for t in outputs]
    rule = rule_for(str(operator.call.op))
    strategies = axis_strategies(rule, operator.call, pattern, *grads)
    return PlacedOperator(operator, pattern, sizes, strategies)


def is_light(operator: Operator) -> bool:
    """Does it cost only the bytes that it touches, and run unchanged on shards and partial sums?"""
    rule = rule_for(str(operator.call.op))
    return rule.flops is None and not rule.lower and not rule.whole_gradients


def form_groups(program: Program, placed: Sequence[PlacedOperator]) -> tuple[OperatorGroup, ...]:
    """Partition the operators into planning nodes, in execution order."""
    members: list[list[PlacedOperator]] = []
    owner: dict[str, int] = {}  # value -> index of its group
    for item in placed:
        operator = item.operator
        sources = {owner[n] for n in operator.inputs if n in owner}
        home = len(members)
        if is_light(operator) and len(sources) == 1:
            (source,) = sources
            if is_light(members[source][0].operator):
                home = source
        if home == len(members):
            members.append([])
        members[home].append(item)
        owner.update(dict.fromkeys(operator.outputs, home))
    used_by: dict[str, set[int]] = {}
    for index, group in enumerate(members):
        for item in group:
            for name in item.operator.inputs:
                used_by.setdefault(name, set()).add(index)
    kept = {program.loss, *program.outputs, *program.sent, *program.updates}
    return tuple(_finish(group, index, owner, used_by, kept) for index, group in enumerate(members))


def _finish(
    group: Sequence[PlacedOperator],
    index: int,
    owner: Mapping[str, int],
    used_by: Mapping[str, set[int]],
    kept: set[str | None],
) -> OperatorGroup:
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for item in group:
        for name in item.operator.inputs:
            if owner.get(name) != index:
                inputs.setdefault(name)
        for name in item.operator.outputs:
            if used_by.get(name, set()) - {index} or name in kept:
                outputs.setdefault(name)
    return OperatorGroup(tuple(group), tuple(inputs), tuple(outputs))


def _consistent(
    item: PlacedOperator, known: Mapping[str, Placement]
) -> Iterator[tuple[int, dict[str, Placement]]]:
    """Strategies of one operator that agree with placements already chosen."""
    operator = item.operator
    for index, strategy in enumerate(item.strategies):
        added: dict[str, Placement] = {}
        for name, placement in zip(
            (*operator.inputs, *operator.outputs),
            (*strategy.inputs, *strategy.outputs),
            strict=True,
        ):
            if known.get(name, added.get(name, placement)) != placement:
                break
            added[name] = placement
        else:
            yield index, added
