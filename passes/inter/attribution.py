"""Attributes the numbers of a solved intra-operator problem to operators.

Each number of the chosen placements belongs to one operator of the program:

    a group         to its first operator
    a reshard       to the first operator that reads the value so
    a parameter     to the first operator that uses it; if operators in several places do, to all of
                    them together (`Shared`): a stage that has one of them pays it

Seconds per step are kept apart from seconds per microbatch. ZeRO-2 gathers a parameter once and
scatters its gradient m times, for m microbatches; all of that counts as per microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.mesh import Link
from autopar.passes.analysis import Folded
from autopar.passes.inter.crossings import N_NUMBERS, CrossingCosts, PlacedBy
from autopar.passes.intra import IntraOpProblem, ProblemBatch
from autopar.passes.solvers.problem import BoolArray, ChoiceProblems, Codes, Entries, Layout, memory

Array = NDArray[np.float64]
PARTS = ("time", "once", "static", "activation")


@dataclass(frozen=True)
class Shared:
    """A parameter used in several places: its values by part, and the operators that use it.

    A stage that has any of these operators of the whole program pays the values once.
    """

    operators: tuple[int, ...]
    values: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Traffic:
    """One rank's messages of one microbatch over each boundary, [4, boundaries].

    The rows: how many values cross, bytes of the rank's slices, and the same for gradients.
    """

    numbers: Array

    def forward_s(self, link: Link) -> Array:
        return self.numbers[0] * link.latency_s + self.numbers[1] * link.s_per_byte

    def backward_s(self, link: Link) -> Array:
        return self.numbers[2] * link.latency_s + self.numbers[3] * link.s_per_byte


@dataclass(frozen=True, eq=False)
class BatchOwners:
    """What all problems of a batch share: which operators their variables belong to, and who
    makes and reads the values that cross boundaries.

    `crossing` lists the values that cross each boundary of the whole program.
    """

    folded: Folded
    batch: ProblemBatch
    crossing: Sequence[Sequence[str]]

    @property
    def _problem(self) -> IntraOpProblem:
        """The first problem; the others differ in numbers alone."""
        return self.batch.problems.first

    @cached_property
    def _places(self) -> list[tuple[int, ...]]:
        """The folded operators that each variable belongs to.

        A group belongs to its first operator, any other variable to the groups that read it.
        """
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
            # An unread parameter stays on the first stage (`passes/analysis/cutting.py`).
            places.append(tuple(sorted(reached(v))) or (0,))
        return places

    @cached_property
    def parameters(self) -> dict[int, str]:
        return {v: name for name, v in self._problem.parameter_variables.items()}

    @cached_property
    def shared(self) -> dict[int, tuple[int, ...]]:
        """Parameters used in several places -> the operators of the whole program that use them."""
        whole: dict[int, list[int]] = {}
        for i, f in enumerate(self.folded.stands_for):
            whole.setdefault(f, []).append(i)
        return {
            v: tuple(sorted(i for f in self._places[v] for i in whole[f]))
            for v in self.parameters
            if not self._is_local(self._places[v])
        }

    def _is_local(self, places: Sequence[int]) -> bool:
        """Does one operator or one repeated block hold all the places?"""
        blocks = {self.folded.block_of(f) for f in places}
        return len(places) == 1 or (len(blocks) == 1 and None not in blocks)

    @cached_property
    def _owners(self) -> list[int]:
        """The variable that pays each number; the numbers are those of variables, then of edges.

        A parameter pays for its edges; any other edge is paid by its target.
        """
        numbers = self._problem.numbers
        of_edges = (e.u if e.u in self.parameters else e.v for e in numbers.edges)
        return [*range(numbers.n_variables), *of_edges]

    @cached_property
    def paid_together(self) -> list[tuple[int, tuple[int, ...]]]:
        """The numbers that parameters of `shared` pay, with the operators that use them."""
        return [(i, self.shared[v]) for i, v in enumerate(self._owners) if v in self.shared]

    @cached_property
    def paid_alone(self) -> tuple[Codes, Codes]:
        """The other numbers, and the folded operator that each is added to."""
        alone = [(i, v) for i, v in enumerate(self._owners) if v not in self.shared]
        places = [self._places[v][0] for _, v in alone]
        return np.array([i for i, _ in alone], dtype=np.intp), np.array(places, dtype=np.intp)

    @cached_property
    def is_static(self) -> BoolArray:
        """[numbers]: does the number belong to a parameter?"""
        n_groups, numbers = len(self._problem.candidates), self._problem.numbers
        of_edges = (edge.u in self.parameters for edge in numbers.edges)
        variables = (v >= n_groups for v in range(numbers.n_variables))
        return np.array([*variables, *of_edges], dtype=bool)

    def is_once(self, choices: Codes) -> BoolArray:
        """[choices, numbers]: are its seconds per step, for `choices` [choices, variables]?"""
        once = np.tile(self.is_static, (len(choices), 1))
        for per_step, places, variables in self._per_step:
            once[:, places] = per_step[choices[:, variables]]
        return once

    @cached_property
    def _per_step(self) -> list[tuple[BoolArray, list[int], list[int]]]:
        """Per set of parameters with the same storages: which storages are converted once per step,
        the indices of the parameters' edges, and the variable of each edge."""
        numbers, storages = self._problem.numbers, self._problem.storages
        found: dict[int, tuple[BoolArray, list[int], list[int]]] = {}
        for e, edge in enumerate(numbers.edges, numbers.n_variables):
            if (name := self.parameters.get(edge.u)) is not None:
                per_step = np.array([s.period == "step" for s in storages[name]])
                _, places, variables = found.setdefault(id(storages[name]), (per_step, [], []))
                places.append(e)
                variables.append(edge.u)
        return list(found.values())

    @cached_property
    def reader(self) -> _ChoiceReader:
        return _ChoiceReader.of(self.batch.problems.numbers)

    @cached_property
    def crossing_sets(self) -> tuple[list[tuple[str, ...]], list[int]]:
        """The distinct sets of values that cross a boundary, and the set of each boundary.

        Values are named as in the folded program, so boundaries between repeated blocks share one
        set.
        """
        numbers: dict[tuple[str, ...], int] = {}
        stand_in = self.folded.value_for
        sets = (tuple(stand_in[name] for name in values) for values in self.crossing)
        set_of = [numbers.setdefault(names, len(numbers)) for names in sets]
        return list(numbers), set_of

    @cached_property
    def crossings(self) -> dict[str, CrossingCosts]:
        """The costs of each value of the folded program that crosses a boundary."""
        values = {name for names in self.crossing_sets[0] for name in names}
        made: dict[str, PlacedBy] = {}
        read: dict[str, list[PlacedBy]] = {}
        for v, candidates in enumerate(self._problem.candidates):
            for operator in (member.operator for member in candidates.group.members):
                for name in values.intersection(operator.outputs):
                    made[name] = PlacedBy(v, candidates.specs(name))
                for name in values.intersection(operator.inputs):
                    read.setdefault(name, []).append(PlacedBy(v, candidates.specs(name)))
        return {
            name: CrossingCosts(made[name], read.get(name, []), self.batch.problems.tables_of(name))
            for name in values
        }


@dataclass(frozen=True, eq=False)
class _ChoiceReader:
    """Reads the numbers of choices.

    Equal variables share arrays. `cost_s` and `size_bytes` hold each array, [cases or 1, ...], with
    the variables and edges that it belongs to.
    """

    entries: Entries
    cost_s: list[tuple[Array, Codes]]
    size_bytes: list[tuple[Array, Codes]]

    @staticmethod
    def of(numbers: ChoiceProblems) -> _ChoiceReader:
        n, edges = len(numbers.names), numbers.edges
        at_start = Layout((0,) * n, numbers.sizes, (0,) * len(edges), (), 0)
        return _ChoiceReader(
            Entries.of(numbers, at_start),
            _by_array([*numbers.cost_s, *(e.cost_s for e in edges)]),
            _by_array([*numbers.bytes, *(e.bytes for e in edges)]),
        )

    def values(self, cases: Codes, choices: Codes) -> tuple[Array, Array]:
        """(seconds, bytes), each [choices, variables and edges].

        `choices` is [choices, variables]; `cases` [choices] is the case of each.
        """
        at = np.stack([self.entries.at(tuple(choice)) for choice in choices.tolist()])
        cost_s, size_bytes = np.zeros(at.shape), np.zeros(at.shape)
        for out, arrays in ((cost_s, self.cost_s), (size_bytes, self.size_bytes)):
            for array, places in arrays:
                rows = cases[:, None] if len(array) > 1 else 0
                within = np.unravel_index(at[:, places], array.shape[1:])
                out[:, places] = array[rows, *within]
        return cost_s, size_bytes


def _by_array(arrays: Sequence[Array | None]) -> list[tuple[Array, Codes]]:
    """Each distinct array with the indices where it stands; None is left out."""
    found: dict[Hashable, tuple[Array, list[int]]] = {}
    for i, array in enumerate(arrays):
        if array is not None:
            found.setdefault(memory(array), (array, []))[1].append(i)
    return [(array, np.array(at, dtype=np.intp)) for array, at in found.values()]


@dataclass(frozen=True)
class Attribution:
    """Attributes choices of one batch of problems.

    `choices` is [choices, variables]; `cases` [choices] is the problem that each choice solves.
    """

    owners: BatchOwners
    cases: Codes
    choices: Codes

    def parts(self) -> list[tuple[dict[str, Array], tuple[Shared, ...]]]:
        """Per choice: every part, [operators of the whole program], without the parameters that are
        used in several places; and these parameters."""
        owners, folded = self.owners, self.owners.folded
        cost_s, size_bytes = owners.reader.values(self.cases, self.choices)
        counts = np.array([owners.batch.cases[case][1] for case in self.cases])
        is_once, is_static = owners.is_once(self.choices), owners.is_static
        values = {
            "time": np.where(is_once, 0.0, cost_s / counts[:, None]),
            "once": np.where(is_once, cost_s, 0.0),
            "static": np.where(is_static, size_bytes, 0.0),
            "activation": np.where(is_static, 0.0, size_bytes),
        }
        n, n_operators, (alone, places) = len(self.cases), len(folded.kept), owners.paid_alone
        into = (np.arange(n)[:, None] * n_operators + places).ravel()
        whole = np.array(folded.stands_for)
        sums = {}
        for part, array in values.items():
            folded_sums = np.bincount(into, array[:, alone].ravel(), n * n_operators)
            sums[part] = folded_sums.reshape(n, n_operators)[:, whole]
        return [
            (
                {part: array[k] for part, array in sums.items()},
                tuple(
                    Shared(users, {part: float(values[part][k, i]) for part in PARTS})
                    for i, users in owners.paid_together
                ),
            )
            for k in range(n)
        ]

    def crossings(self) -> list[tuple[Array, Array, Traffic]]:
        """Per choice and boundary of the whole program: what the stages before and after it pay per
        microbatch to reshard the values that cross, and the messages of a rank of the stage after
        it."""
        sets, set_of = self.owners.crossing_sets
        costs = {
            name: of.costs_of(self.cases, self.choices).tolist()
            for name, of in self.owners.crossings.items()
        }
        nothing, out = [0.0] * N_NUMBERS, []
        for k in range(len(self.cases)):
            sums = [
                [*map(math.fsum, zip(nothing, *(costs[name][k] for name in names), strict=True))]
                for names in sets
            ]
            rows = np.array(sums, dtype=np.float64).reshape(-1, N_NUMBERS)[set_of].T
            out.append((rows[0], rows[1], Traffic(rows[2:])))
        return out
