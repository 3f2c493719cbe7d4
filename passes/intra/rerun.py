"""What runs again in backward: operators, who holds which values, and what reshards cost.

A recomputed range ends with the last operator whose backward needs something made in the range, as
its segment will (`passes/lowering/segments.py`). The operators after it run once, outside. Values
are identified by the value that owns their storage. The *parties* that may hold a value are

    the operators that save it for backward    unless they are in a range that runs again
    the ranges that take it as input           if they run again

If one range is the only party, its mode decides what the value costs. If there are several parties,
the value is charged whatever their modes.

The first two are known before any placement (`RerunRanges`). A reshard that runs again costs the
sum over the moves of its path (`rerun_costs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.arrays import Array
from autopar.manual import Recompute
from autopar.passes.analysis import Analysis
from autopar.passes.intra.cases import Cases
from autopar.passes.reshard import ReshardTables
from autopar.placement import COLLECTIVES, Spec
from autopar.program.communication import Needs, Step
from autopar.rules import OpRule, is_function, rule_for

# Consecutive positions in `Analysis.operators`.
Positions = range
# The index of a range; None: outside all ranges.
Party = int | None


@dataclass(frozen=True, eq=False)
class RerunRanges:
    """The ranges of a program that may run again.

    `full` are the full ranges; `every` drops the operators after their ends. A range is empty if
    backward needs nothing from it.
    """

    analysis: Analysis
    full: tuple[Positions, ...]

    @cached_property
    def every(self) -> tuple[Positions, ...]:
        """Per range of `full`, its part up to the last operator that saves something from it."""
        return tuple(self._needed(positions) for positions in self.full)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Operator -> its position."""
        return {operator.name: i for i, operator in enumerate(self.analysis.operators)}

    @cached_property
    def party_of(self) -> Mapping[int, int]:
        """Position -> the range that contains it."""
        return {i: r for r, positions in enumerate(self.every) for i in positions}

    def rule(self, i: int) -> OpRule:
        return rule_for(str(self.analysis.operators[i].call.op))

    def is_matmul(self, i: int) -> bool:
        return self.rule(i).flops is not None

    def runs_again(self, i: int, mode: Recompute) -> bool:
        """Does some backward of its range need that an operator runs again in this mode?

        Matmuls do not in "selective", but for those that a function replaces.
        """
        is_apart = mode == "selective" and not self.is_matmul(i)
        return i in self._needed_again["selective" if is_apart else "full"]

    @cached_property
    def _needed_again(self) -> Mapping[Recompute, frozenset[int]]:
        full, selective = set[int](), set[int]()
        for positions, needs in zip(self.every, self._needs, strict=True):
            apart = {i for i in positions if not self.is_matmul(i)}
            for i in positions:
                full |= needs.reruns(i, positions)
                selective |= needs.reruns(i, apart)
        return {"full": frozenset(full), "selective": frozenset(selective)}

    @cached_property
    def matmuls_read_again(self) -> frozenset[int]:
        """The matmuls of ranges whose results backward reads, or what runs again in "selective"."""
        found = set[int]()
        for positions, needs in zip(self.every, self._needs, strict=True):
            for i in positions:
                again = i in self._needed_again["selective"]
                found |= needs.kept[i] | (needs.read[i] if again else set())
        return frozenset(i for i in found if self.is_matmul(i))

    @cached_property
    def _needs(self) -> tuple[Needs, ...]:
        return tuple(Needs.of(p.start, map(self._step, p)) for p in self.every)

    def _step(self, i: int) -> Step:
        operator, rule = self.analysis.operators[i], self.rule(i)
        saved = self.analysis.saved.get(operator.name)
        return Step.call(
            operator.inputs, operator.outputs, self.kept_by(i),
            saved.other_bytes if saved else 0.0, is_function(str(operator.call.op)),
            self.is_matmul(i) and not rule.saves_more,
        )  # fmt: skip

    def matmul_of_bias_add(self, i: int) -> str | None:
        """The matmul result to which an operator only adds a bias; else None.

        The two run as one unless a reshard is between them (`passes/lowering/fusion.py`).
        """
        return self.analysis.bias_adds.get(self.analysis.operators[i].name)

    def aliases(self, value: str) -> Iterator[str]:
        """A value, then what it is called with a bias and as a view of its size, as long as nothing
        else reads it."""
        tensors = self.analysis.types.tensors
        while True:
            yield value
            readers = self._readers.get(value, ())
            if len(readers) != 1:
                return
            operator = self.analysis.operators[readers[0]]
            (name, *more) = operator.outputs
            is_view = self.rule(readers[0]).view and self.owner(name) == self.owner(value)
            if more or not (is_view or self.matmul_of_bias_add(readers[0]) == value):
                return
            if tensors[name].size_bytes != tensors[value].size_bytes:
                return
            value = name

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[int]]:
        found: dict[str, list[int]] = {}
        for i, operator in enumerate(self.analysis.operators):
            for name in operator.inputs:
                found.setdefault(name, []).append(i)
        return found

    @cached_property
    def matmul_of(self) -> Mapping[str, str]:
        """Value -> the matmul's result of which it is an alias."""
        return {
            name: value
            for i, operator in enumerate(self.analysis.operators)
            if self.is_matmul(i)
            for value in operator.outputs
            for name in self.aliases(value)
        }

    def owner(self, value: str) -> str:
        return self.analysis.storage_owners.get(value, value)

    @cached_property
    def taken(self) -> tuple[tuple[str, ...], ...]:
        """Per range, the values it reads that other operators or stages make."""
        found = []
        for positions in self.every:
            inputs = (n for i in positions for n in self.analysis.operators[i].inputs)
            own = dict.fromkeys(self.owner(name) for name in inputs)
            found.append(tuple(n for n in own if self._is_made_before(n, positions)))
        return tuple(found)

    def _is_made_before(self, value: str, positions: Positions) -> bool:
        made = self._made_at.get(value)
        if made is None:
            return value in self.analysis.program.received
        return made not in positions

    @cached_property
    def _made_at(self) -> Mapping[str, int]:
        return {n: i for i, o in enumerate(self.analysis.operators) for n in o.outputs}

    @cached_property
    def parties(self) -> Mapping[str, frozenset[Party]]:
        """Value -> the parties that may hold it."""
        found: dict[str, set[Party]] = {}
        for i in range(len(self.analysis.operators)):
            for value in self.kept_by(i):
                found.setdefault(self.owner(value), set()).add(self.party_of.get(i))
        for r, values in enumerate(self.taken):
            for value in values:
                found.setdefault(value, set()).add(r)
        return {value: frozenset(of) for value, of in found.items()}

    @cached_property
    def kept(self) -> frozenset[str]:
        """The values that some operator saves for backward."""
        n = len(self.analysis.operators)
        return frozenset(self.owner(v) for i in range(n) for v in self.kept_by(i))

    def is_only(self, value: str, r: int) -> bool:
        """Is range `r` the only party of a value?"""
        return self.parties.get(self.owner(value), frozenset()) <= {r}

    def kept_by(self, i: int) -> Sequence[str]:
        """The values that an operator saves for backward."""
        operator = self.analysis.operators[i]
        saved = self.analysis.saved.get(operator.name)
        if saved is None:
            return ()
        inputs = [operator.inputs[k] for k in sorted(saved.inputs)]
        return [*inputs, *(operator.outputs[k] for k in sorted(saved.outputs))]

    def _needed(self, positions: Positions) -> Positions:
        operators, saved = self.analysis.operators, self.analysis.saved
        made = {self.owner(name) for i in positions for name in operators[i].outputs}
        for i in reversed(positions):
            own = saved.get(operators[i].name)
            if own is None:
                continue
            kept = {self.owner(name) for name in self.kept_by(i)}
            if own.other_bytes or kept & made:
                return range(positions.start, i + 1)
        return range(positions.start, positions.start)


@dataclass(frozen=True, eq=False)
class RerunCosts:
    """Costs of the reshards between two variables: [cases, specs made, specs wanted] each.

    forward_s     seconds of one microbatch's forward
    local_s       the part of them in local moves
    kept_bytes    bytes of the results of collectives
    calls         number of collectives
    moves         number of moves
    """

    forward_s: Array
    local_s: Array
    kept_bytes: Array
    calls: Array
    moves: Array


def n_shards_of(specs: Sequence[Spec], cases: Cases) -> Array:
    """[cases, specs]: the number of shards of a tensor."""
    is_cut = np.array([[p.is_shard for p in spec.placements] for spec in specs], dtype=bool)
    found: Array = np.where(is_cut, cases.sizes[:, None, :], 1).prod(axis=2).astype(np.float64)
    return found


def rerun_costs(
    tables: ReshardTables, cases: Cases, made: Sequence[Spec], wanted: Sequence[Spec]
) -> RerunCosts:
    """The `RerunCosts` of the cheapest paths between two lists of specs."""
    graph, size_bytes = tables.graph, tables.size_bytes
    seconds = tables.forward_s
    kinds = np.array([p.kind in COLLECTIVES for p in graph.primitives], dtype=bool)
    calls = np.broadcast_to(kinds[graph.forward], seconds.shape).astype(np.float64)
    results = (size_bytes[:, None] / n_shards_of(graph.specs, cases))[:, graph.target]
    rows = [tables.index[spec] for spec in made]
    columns = [tables.index[spec] for spec in wanted]
    of_moves = [seconds, seconds * (1 - calls), results * calls, calls, np.ones_like(calls)]
    sums = tables.path_sums(rows, columns, np.stack(of_moves, axis=1))
    return RerunCosts(*(sums[:, k] for k in range(len(of_moves))))
