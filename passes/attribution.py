"""A solved intra-operator problem, read operator by operator.

Each number of the chosen placements belongs to one operator of the program:

    a group         to its first operator
    a reshard       to the first operator that reads the value so
    a parameter     to the first operator that uses it; if operators in several places do, to
                    all of them together (`Shared`): whoever holds one of them pays it

With m microbatches, what is done once per step is kept apart from what each microbatch does.
Of ZeRO-2, whose parameters are gathered once and scattered m times, all counts as the latter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.mesh import Link
from autopar.passes.boundaries import boundary_specs
from autopar.passes.folding import Folded
from autopar.passes.intra_op import ProblemBatch
from autopar.passes.problem import IntraOpProblem
from autopar.passes.reshard import ReshardTables
from autopar.passes.solvers.problem import Choice
from autopar.passes.spec_column import SpecColumn
from autopar.spec import Spec, local_bytes

Array = NDArray[np.float64]
PARTS = ("time", "once", "static", "activation")


@dataclass(frozen=True)
class Shared:
    """A parameter used in several places: its values, and all operators of the whole program
    of which one is enough to pay them."""

    operators: tuple[int, ...]
    values: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Messages of one microbatch over each boundary, of a rank: how many values cross, bytes of its
    slices of them, and the same of gradients that return: [4, boundaries]."""

    numbers: Array

    def forward_s(self, link: Link) -> Array:
        return self.numbers[0] * link.latency_s + self.numbers[1] * link.s_per_byte

    def backward_s(self, link: Link) -> Array:
        return self.numbers[2] * link.latency_s + self.numbers[3] * link.s_per_byte


class _Paid(NamedTuple):
    """Seconds of the stages before and after a boundary for placing what crosses there; then the
    messages of a rank after it, as in `Traffic`."""

    leave_s: float = 0.0
    enter_s: float = 0.0
    n_values: float = 0.0
    value_bytes: float = 0.0
    n_gradients: float = 0.0
    gradient_bytes: float = 0.0


_NOTHING = _Paid()


@dataclass(frozen=True, eq=False)
class Wiring:
    """What problems that were built together have in common: what their variables belong to, and
    who makes and reads the values that cross the boundaries `crossing` of the whole program."""

    folded: Folded
    batch: ProblemBatch
    crossing: Sequence[Sequence[str]]

    @property
    def _problem(self) -> IntraOpProblem:
        """The first; the others differ in numbers alone."""
        return self.batch.problems.first

    # -- what variables belong to ------------------------------------------------------------

    @cached_property
    def _places(self) -> list[tuple[int, ...]]:
        """The folded operators that each variable belongs to: of groups their first, of others
        those of the groups that read them."""
        position = {o.name: f for f, o in enumerate(self.folded.analysis.operators)}
        n_groups = len(self._problem.candidates)
        places: list[tuple[int, ...]] = [
            (position[c.group.name],) for c in self._problem.candidates
        ]
        readers: dict[int, list[int]] = {}
        for edge in self._problem.numbers.edges:
            readers.setdefault(edge.u, []).append(edge.v)

        def reached(v: int) -> set[int]:
            if v < n_groups:
                return set(places[v])
            return {f for reader in readers.get(v, ()) for f in reached(reader)}

        for v in range(n_groups, self._problem.numbers.n_variables):
            # What nothing reads stays with the first stage (`passes/cut.py`).
            places.append(tuple(sorted(reached(v))) or (0,))
        return places

    @cached_property
    def place(self) -> list[int]:
        """The folded operator that each variable's numbers are added to, but those of `shared`."""
        return [places[0] for places in self._places]

    @cached_property
    def parameters(self) -> dict[int, str]:
        return {v: name for name, v in self._problem.parameter_variables.items()}

    @cached_property
    def shared(self) -> dict[int, tuple[int, ...]]:
        """Parameter used in several places -> the operators of the whole program that use it."""
        whole: dict[int, list[int]] = {}
        for i, f in enumerate(self.folded.stands_for):
            whole.setdefault(f, []).append(i)
        return {
            v: tuple(sorted(i for f in self._places[v] for i in whole[f]))
            for v in self.parameters
            if not self._is_local(self._places[v])
        }

    def _is_local(self, places: Sequence[int]) -> bool:
        """Is a parameter used in one place: at one operator, or within one repeated block?"""
        blocks = {self.folded.block_of(f) for f in places}
        return len(places) == 1 or (len(blocks) == 1 and None not in blocks)

    # -- boundaries --------------------------------------------------------------------------

    @cached_property
    def kinds(self) -> tuple[list[tuple[str, ...]], list[int]]:
        """What crosses together, as values of the folded program; and which of these each boundary
        is. Between blocks that are alike the like crosses."""
        numbers: dict[tuple[str, ...], int] = {}
        stand_in = self.folded.value_for
        likes = (tuple(stand_in[name] for name in values) for values in self.crossing)
        kind_of = [numbers.setdefault(like, len(numbers)) for like in likes]
        return list(numbers), kind_of

    @cached_property
    def crossings(self) -> dict[str, _Crossing]:
        """Who makes and reads each value of the folded program that crosses."""
        values = {name for like in self.kinds[0] for name in like}
        made: dict[str, _Placed] = {}
        read: dict[str, list[_Placed]] = {}
        for v, candidates in enumerate(self._problem.candidates):
            for operator in (member.operator for member in candidates.group.members):
                for name in values.intersection(operator.outputs):
                    made[name] = _Placed(v, candidates.specs(name))
                for name in values.intersection(operator.inputs):
                    read.setdefault(name, []).append(_Placed(v, candidates.specs(name)))
        return {
            name: _Crossing(made[name], read.get(name, []), self.batch.problems.tables_of(name))
            for name in values
        }


class _Placed(NamedTuple):
    """A variable, and how its choices place a value."""

    variable: int
    specs: SpecColumn

    def by(self, choice: Choice) -> Spec:
        return self.specs[choice[self.variable]]


@dataclass(frozen=True, eq=False)
class _Crossing:
    """A value as a boundary of stages; what was paid for it with some placements is known."""

    made: _Placed
    read: Sequence[_Placed]
    tables: ReshardTables
    _known: dict[tuple[int, Spec, tuple[Spec, ...]], _Paid] = field(default_factory=dict)

    def paid(self, choice: Choice, case: int) -> _Paid:
        """Cut into slices after its producer, which the stage that reads it turns into what its
        operators want, in place of what the producer made."""
        made, wanted = self.made.by(choice), tuple(dict.fromkeys(r.by(choice) for r in self.read))
        key = case, made, wanted
        if key not in self._known:
            self._known[key] = self._price(made, wanted, case)
        return self._known[key]

    def _price(self, made: Spec, wanted: Sequence[Spec], case: int) -> _Paid:
        table, sizes = self.tables.of(case), self.tables.sizes[case]
        tensor = table.tensor
        sent = boundary_specs(tensor, sizes, "sent")
        received = boundary_specs(tensor, sizes, "received")
        (sent_s,), (read_s,) = table.seconds([made], sent), table.seconds([made], wanted)
        leave_s, before_s = min(sent_s), sum(read_s)
        enter_s = min(map(sum, table.seconds(received, wanted)))
        size_bytes, has_grad = local_bytes(tensor, received[0], sizes), tensor.has_grad
        return _Paid(
            leave_s, enter_s - before_s, 1, size_bytes, has_grad, size_bytes if has_grad else 0.0
        )


@dataclass(frozen=True)
class Attribution:
    """Reads choices of the problem of a cost model and a number of microbatches, one of those
    wired so."""

    wiring: Wiring
    cost: CostModel
    n_microbatches: int

    @cached_property
    def problem(self) -> IntraOpProblem:
        return self.wiring.batch.of(self.cost, self.n_microbatches)

    def parts(self, choice: Choice) -> tuple[dict[str, Array], tuple[Shared, ...]]:
        """Per operator of the whole program, and of parameters used in several places."""
        folded, place, users = self.wiring.folded, self.wiring.place, self.wiring.shared
        arrays = {part: [0.0] * len(folded.kept) for part in PARTS}
        shared = []
        for v, values in self._numbers(choice):
            if v in users:
                shared.append(Shared(users[v], values))
                continue
            for part, value in values.items():
                arrays[part][place[v]] += value
        at = np.array(folded.stands_for)
        return {part: np.array(array)[at] for part, array in arrays.items()}, tuple(shared)

    def _numbers(self, choice: Choice) -> Iterator[tuple[int, dict[str, float]]]:
        """(variable, its numbers), edges with the variable that they belong to."""
        numbers, m = self.problem.numbers, self.n_microbatches
        n_groups, parameters = len(self.problem.candidates), self.wiring.parameters
        for v, k in enumerate(choice):
            cost_s, size_bytes = numbers.cost_s[v].item(k), numbers.bytes[v].item(k)
            if v < n_groups:
                yield v, {"time": cost_s / m, "activation": size_bytes}
            else:
                yield v, {"once": cost_s, "static": size_bytes}
        for edge in numbers.edges:
            at = edge.at(choice)
            cost_s = edge.cost_s.item(at)
            size_bytes = 0.0 if edge.bytes is None else edge.bytes.item(at)
            name = parameters.get(edge.u)
            if name is None:  # a reshard, or what runs again in some mode
                if cost_s or size_bytes:
                    yield edge.v, {"time": cost_s / m, "activation": size_bytes}
            elif self.problem.storages[name][choice[edge.u]].period == "step":
                yield edge.u, {"once": cost_s, "static": size_bytes}
            else:
                yield edge.u, {"time": cost_s / m, "static": size_bytes}

    def crossings(self, choice: Choice) -> tuple[Array, Array, Traffic]:
        """Per boundary: what the stages before and after it pay in each microbatch for placing
        values of the whole program as they cross there, and the messages of a rank after it."""
        wiring = self.wiring
        likes, kind_of = wiring.kinds
        case = wiring.batch.place(self.cost, self.n_microbatches)
        paid = {n: of.paid(choice, case) for n, of in wiring.crossings.items()}
        sums = [
            _Paid(*map(math.fsum, zip(_NOTHING, *(paid[n] for n in like), strict=True)))
            for like in likes
        ]
        rows = np.array(sums, dtype=np.float64).reshape(-1, len(_NOTHING))[kind_of].T
        return rows[0], rows[1], Traffic(rows[2:])
