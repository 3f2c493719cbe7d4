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
from dataclasses import dataclass
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
from autopar.passes.reshard import ReshardTable
from autopar.passes.solvers.problem import Choice
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


@dataclass(frozen=True)
class Attribution:
    """Reads choices of the problem of a cost model and a number of microbatches, one of `batch`."""

    folded: Folded
    problem: IntraOpProblem
    batch: ProblemBatch
    cost: CostModel
    n_microbatches: int

    # -- what variables belong to ------------------------------------------------------------

    @cached_property
    def _places(self) -> list[tuple[int, ...]]:
        """The folded operators that each variable belongs to: of groups their first, of others
        those of the groups that read them."""
        position = {o.name: f for f, o in enumerate(self.folded.analysis.operators)}
        n_groups = len(self.problem.candidates)
        places: list[tuple[int, ...]] = [(position[c.group.name],) for c in self.problem.candidates]
        readers: dict[int, list[int]] = {}
        for edge in self.problem.numbers.edges:
            readers.setdefault(edge.u, []).append(edge.v)

        def reached(v: int) -> set[int]:
            if v < n_groups:
                return set(places[v])
            return {f for reader in readers.get(v, ()) for f in reached(reader)}

        for v in range(n_groups, self.problem.numbers.n_variables):
            # What nothing reads stays with the first stage (`passes/cut.py`).
            places.append(tuple(sorted(reached(v))) or (0,))
        return places

    @cached_property
    def _whole(self) -> dict[int, list[int]]:
        """Folded operator -> the operators of the whole that it stands for."""
        out: dict[int, list[int]] = {}
        for i, f in enumerate(self.folded.stands_for):
            out.setdefault(f, []).append(i)
        return out

    def _is_local(self, places: Sequence[int]) -> bool:
        """Is a parameter used in one place: at one operator, or within one repeated block?"""
        blocks = {self.folded.block_of(f) for f in places}
        return len(places) == 1 or (len(blocks) == 1 and None not in blocks)

    # -- numbers -----------------------------------------------------------------------------

    def parts(self, choice: Choice) -> tuple[dict[str, Array], tuple[Shared, ...]]:
        """Per operator of the whole program, and of parameters used in several places."""
        n = len(self.folded.kept)
        arrays = {part: np.zeros(n) for part in PARTS}
        shared = []
        for v, values in self._numbers(choice):
            places = self._places[v]
            if v in self._parameters and not self._is_local(places):
                whole = sorted(i for f in places for i in self._whole[f])
                shared.append(Shared(tuple(whole), values))
                continue
            for part, value in values.items():
                arrays[part][places[0]] += value
        at = np.array(self.folded.stands_for)
        return {part: array[at] for part, array in arrays.items()}, tuple(shared)

    @cached_property
    def _parameters(self) -> dict[int, str]:
        return {v: name for name, v in self.problem.parameter_variables.items()}

    def _numbers(self, choice: Choice) -> Iterator[tuple[int, dict[str, float]]]:
        """(variable, its numbers), edges with the variable that they belong to."""
        numbers, m = self.problem.numbers, self.n_microbatches
        n_groups = len(self.problem.candidates)
        for v, k in enumerate(choice):
            cost_s, size_bytes = float(numbers.cost_s[v][k]), float(numbers.bytes[v][k])
            if v < n_groups:
                yield v, {"time": cost_s / m, "activation": size_bytes}
            else:
                yield v, {"once": cost_s, "static": size_bytes}
        for edge in numbers.edges:
            at = edge.at(choice)
            cost_s = float(edge.cost_s[at])
            size_bytes = 0.0 if edge.bytes is None else float(edge.bytes[at])
            name = self._parameters.get(edge.u)
            if name is None:  # a reshard, or what runs again in some mode
                if cost_s or size_bytes:
                    yield edge.v, {"time": cost_s / m, "activation": size_bytes}
            elif self.problem.storages[name][choice[edge.u]].period == "step":
                yield edge.u, {"once": cost_s, "static": size_bytes}
            else:
                yield edge.u, {"time": cost_s / m, "static": size_bytes}

    # -- boundaries --------------------------------------------------------------------------

    def crossings(
        self, choice: Choice, crossing: Sequence[Sequence[str]]
    ) -> tuple[Array, Array, Traffic]:
        """Per boundary: what the stages before and after it pay in each microbatch for placing
        values of the whole program as they cross there, and the messages of a rank after it."""
        reader, stand_in = _Crossings(self, choice), self.folded.value_for
        # Between blocks that are alike the like crosses.
        kinds: dict[tuple[str, ...], _Paid] = {}
        paid = []
        for values in crossing:
            like = tuple(stand_in[name] for name in values)
            if like not in kinds:
                each = [reader.paid(name) for name in like]
                sums = map(math.fsum, zip(_NOTHING, *each, strict=True))
                kinds[like] = _Paid(*sums)
            paid.append(kinds[like])
        rows = np.array(paid, dtype=np.float64).reshape(-1, len(_NOTHING)).T
        return rows[0], rows[1], Traffic(rows[2:])

    def table(self, value: str) -> ReshardTable:
        return self.batch.table(value, self.cost, self.n_microbatches)


class _Crossings:
    """Prices values of the folded program as boundaries of stages."""

    def __init__(self, attribution: Attribution, choice: Choice) -> None:
        self.attribution, self.choice = attribution, choice
        self.made: dict[str, Spec] = {}
        self.read: dict[str, dict[Spec, None]] = {}
        self.known: dict[str, _Paid] = {}
        for v, candidates in enumerate(attribution.problem.candidates):
            for member in candidates.group.members:
                for name in member.operator.outputs:
                    self.made[name] = candidates.spec(choice[v], name)
                for name in member.operator.inputs:
                    spec = candidates.spec(choice[v], name)
                    self.read.setdefault(name, {})[spec] = None

    def paid(self, value: str) -> _Paid:
        """Cut into slices after its producer, which the stage that reads it turns into what its
        operators want, in place of what the producer made."""
        if value not in self.known:
            self.known[value] = self._price(value)
        return self.known[value]

    def _price(self, value: str) -> _Paid:
        table, sizes = self.attribution.table(value), self.attribution.cost.mesh.sizes
        made, wanted = self.made[value], tuple(self.read.get(value, {}))
        sent = boundary_specs(table.tensor, sizes, "sent")
        received = boundary_specs(table.tensor, sizes, "received")
        (sent_s,), (read_s,) = table.seconds([made], sent), table.seconds([made], wanted)
        leave_s, before_s = min(sent_s), sum(read_s)
        enter_s = min(map(sum, table.seconds(received, wanted)))
        size_bytes, has_grad = local_bytes(table.tensor, received[0], sizes), table.tensor.has_grad
        return _Paid(
            leave_s, enter_s - before_s, 1, size_bytes, has_grad, size_bytes if has_grad else 0.0
        )
