"""The problem of a program with repeated blocks, built from the problem of its folded program.

A folded program (`passes/analysis/folding.py`) has the first two blocks of a run and the last one.
The variables of the second block stand for those of every block between the first and the last.
Each such block is a *copy* and chooses for itself (`passes/solvers/repeats/repeats.py`). A variable
belongs to the block in which its group of operators begins, or which has all its readers.

Variables of the first block that are joined to the second each have a counterpart in the second.
Copies are joined to the next copy through these counterparts. So the optimum is that of the whole
program. If blocks are joined in any other way, there is no such problem (`repeated_problems`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import Array, BoolArray
from autopar.passes.analysis import Folded, OperatorGroup, Run, Side, place_in
from autopar.passes.intra.hiding import ExposureWeights, Parts
from autopar.passes.intra.problem import IntraOpProblem, IntraOpProblems
from autopar.passes.solvers.problem import ProblemError
from autopar.passes.solvers.repeats import (
    QuickPlan,
    Repeat,
    RepeatedChoice,
    RepeatedProblem,
    RepeatedProblems,
    quick_plan,
)
from autopar.placement import Spec
from autopar.program.lines import OperatorStrategy, Recomputed, Storage

# (run, block) of a folded operator or variable; None: outside all runs, or in several blocks.
Place = tuple[int, int] | None
# Cases whose seconds are kept apart; several budgets are tried in one case after the other.
MOST_APART = 4
_FIRST, _COPIED, _LAST = 0, 1, 2


def repeated_problems(folded: Folded, problems: IntraOpProblems) -> Repeated | None:
    """The whole program's problems; None if one block cannot stand exactly for the others."""
    return _Maker(folded, problems).make()


class TimeParts(NamedTuple):
    """Of the numbers of a row: compute, and what compute may hide, once a step and otherwise."""

    compute_s: Array
    sync_s: Array
    blocks_s: Array


@dataclass(frozen=True)
class HidingProblem:
    """A problem with all copies, and the step of its choices where compute hides communication."""

    problem: RepeatedProblem
    apart: TimeParts

    def parts(self, choice: RepeatedChoice) -> Parts:
        """A choice's seconds, apart for `Hiding`."""
        apart = (of.evaluate(choice).cost_s for of in self._each)
        return Parts(self.problem.evaluate(choice).cost_s, *apart)

    @cached_property
    def _each(self) -> list[RepeatedProblem]:
        return [replace(self.problem, costs=row) for row in self.apart]

    def weigh(self, weights: ExposureWeights) -> RepeatedProblem:
        """The problem in which exposed communication has a price."""
        cost_s = self.problem.row.cost_s[0]
        allowed, (hidden, *others) = np.isfinite(cost_s), weights
        added = sum(
            w * np.where(allowed, of, 0.0) for w, of in zip(others, self.apart, strict=True)
        )
        return replace(self.problem, costs=np.maximum(cost_s * (1 + hidden) + added, 0.0))


@dataclass(frozen=True, eq=False)
class Repeated:
    """The whole program's problems in several cases, and how to read their choices."""

    folded: Folded
    folded_problem: IntraOpProblem
    problems: RepeatedProblems
    group_of: Mapping[int, int]
    _time_parts: dict[int, TimeParts] = field(default_factory=dict, init=False)

    @cached_property
    def plan(self) -> QuickPlan | None:
        """The `quick_plan` of the problems; all cases share it."""
        return quick_plan(self.problems)

    @cached_property
    def _is_once(self) -> BoolArray:
        return self.folded_problem.is_once(self.problems.numbers, range(self.n_variables))

    def once_s(self, problem: RepeatedProblem, choice: RepeatedChoice) -> float:
        """What of a choice's seconds a step pays once, in one of the problems."""
        costs = np.where(self._is_once, problem.row.cost_s[0], 0.0)
        return replace(problem, costs=costs).evaluate(choice).cost_s

    def time_parts(self, case: int) -> TimeParts:
        """What of a case's numbers is compute, and what compute may hide."""
        if case not in self._time_parts:
            layout, problem = self.problems.layout, self.folded_problem
            of = TimeParts(*(np.zeros(layout.n_numbers) for _ in range(3)))
            row_s = self.problems.row(case, 1).cost_s[0]
            for v in problem.computes:
                own = slice(layout.own_at[v], layout.own_at[v] + layout.n_choices[v])
                of.compute_s[own] = row_s[own]
            for edge, at, shape in self.problems.tables(range(len(self.problems.numbers.edges))):
                if edge.is_of(problem.runs_again):
                    table_at = slice(at, at + math.prod(shape))
                    of.compute_s[table_at] = row_s[table_at]
                for v, turned in ((edge.u, False), (edge.v, True)):
                    if v in problem.hidable:
                        for row, found in zip(of[1:], problem.hidable[v](case), strict=True):
                            table = found.T if turned else found
                            assert table.shape == shape, "a conversion has an edge of its own"
                            row[at : at + math.prod(shape)] = table.ravel()
            self._time_parts[case] = of
            if len(self._time_parts) > MOST_APART:
                del self._time_parts[next(iter(self._time_parts))]
        return self._time_parts[case]

    def operators(self, choice: RepeatedChoice) -> dict[str, OperatorStrategy]:
        """Operator of the whole program -> its strategy."""
        out = {}
        for whole, f, copy in self._stand_ins:
            v, name = self.group_of[f], self.folded.analysis.operators[f].name
            of_group = self.folded_problem.candidates[v].strategies(self._choice(choice, v, copy))
            out[self.folded.whole.operators[whole].name] = of_group[name]
        return out

    def storage(self, choice: RepeatedChoice) -> dict[str, Storage]:
        """Parameter of the whole program -> its storage."""
        variables, storages = self.folded_problem.parameter_variables, self.folded_problem.storages
        out = {name: storages[name][choice.base[v]] for name, v in variables.items()}
        parameters = self.folded.whole.program.parameters
        for whole, f, copy in self._stand_ins:
            theirs = self.folded.analysis.operators[f].inputs
            for name, like in zip(self.folded.whole.operators[whole].inputs, theirs, strict=True):
                if name in parameters:
                    out[name] = storages[like][self._choice(choice, variables[like], copy)]
        return {name: out[name] for name in parameters}

    @property
    def n_variables(self) -> int:
        return len(self.problems.sizes)

    @property
    def n_written_out(self) -> int:
        """The number of variables of the whole program's problem, with all copies of blocks."""
        copies = sum(len(repeat.block) * (repeat.count - 1) for repeat in self.problems.repeats)
        return self.n_variables + copies

    def boundaries(self, choice: RepeatedChoice, side: Side) -> dict[str, Spec]:
        """Value -> its spec, for the values that cross on one side."""
        return self.folded_problem.boundaries(choice.base, side)

    def recomputed(self, choice: RepeatedChoice) -> tuple[Recomputed, ...]:
        """The ranges that run again in backward, in order; each lies within a block."""
        names = [operator.name for operator in self.folded.whole.operators]
        found = []
        for (mode, copy), items in itertools.groupby(self._modes, lambda item: item[:2]):
            of = None if mode is None else self.folded_problem.modes[mode]
            if of is not None:
                v = of.variable
                like = of.recomputed(None if v is None else self._choice(choice, v, copy))
                if like is not None:
                    own = tuple(names[i] for _, _, i in items)
                    found.append(Recomputed(like.mode, own))
        return tuple(found)

    @cached_property
    def _modes(self) -> list[tuple[int | None, int | None, int]]:
        """Per operator of the whole program: the index of its range in the folded problem, its
        copy, and its position."""
        folded, out = self.folded, []
        place = {n: k for k, of in enumerate(self.folded_problem.modes) for n in of.operators}
        for i, f in enumerate(folded.stands_for):
            at, copy = place_in(folded.runs, i), None
            if at is not None and 0 < at[1] < folded.runs[at[0]].count - 1:
                copy = at[1] - 1
            out.append((place.get(folded.analysis.operators[f].name), copy, i))
        return out

    def _choice(self, choice: RepeatedChoice, v: int, copy: int | None) -> int:
        """The choice of variable v in a copy of its block; outside blocks there is one choice."""
        if copy is not None:
            for repeat, rows in zip(self.problems.repeats, choice.copies, strict=True):
                if v in repeat.block:
                    return rows[copy][repeat.block.index(v)]
        return choice.base[v]

    @cached_property
    def _stand_ins(self) -> list[tuple[int, int, int | None]]:
        """Per operator of the whole program: its position, the folded operator whose placement it
        takes, and the copy.

        If the second block's operator is in a group of the first block, the third block's operator
        is in a group of the first copy, and so on.
        """
        folded, out = self.folded, []
        blocks = [set(repeat.block) for repeat in self.problems.repeats]
        for i, f in enumerate(folded.stands_for):
            at, copy = place_in(folded.runs, i), None
            if at is not None:
                (r, j), run = at, folded.runs[at[0]]
                _, copied, last = places_of(folded, run, (i - run.start) % run.period)
                copies_from = 1 if self.group_of[copied] in blocks[r] else 2
                if copies_from <= j < run.count - (copies_from == 1):
                    f, copy = (copied, last)[copies_from - 1], j - copies_from
            out.append((i, f, copy))
        return out


def places_of(folded: Folded, run: Run, offset: int) -> tuple[int, int, int]:
    """The folded operators at one offset of a run's blocks: first, copied and last block."""
    first = folded.stands_for[run.start] + offset
    return first, first + run.period, first + 2 * run.period


def placed_once(folded: Folded, n_microbatches: int) -> dict[str, int]:
    """Operator of a copied block -> the number of blocks it stands for, if its group begins outside
    all runs.

    Such a group has the operators of every block (each block masks one tensor, say), so it belongs
    to no copy.
    """
    blocks = {o.name: folded.block_of(f) for f, o in enumerate(folded.analysis.operators)}
    out = {}
    for group in folded.analysis.groups(n_microbatches):
        if blocks[group.name] is not None:
            continue
        for member in group.members:
            place = blocks[member.name]
            if place is not None and place[1] == _COPIED:
                out[member.name] = folded.runs[place[0]].count - 2
    return out


class _Maker:
    def __init__(self, folded: Folded, problems: IntraOpProblems) -> None:
        self.folded, self.problem, self.numbers = folded, problems.first, problems.numbers
        operators = folded.analysis.operators
        position = {o.name: f for f, o in enumerate(operators)}
        self.members = [
            tuple(position[m.name] for m in c.group.members) for c in self.problem.candidates
        ]
        self.group_of = {f: v for v, members in enumerate(self.members) for f in members}

    def make(self) -> Repeated | None:
        if not self._groups_repeat():
            return None
        repeats = []
        for r, run in enumerate(self.folded.runs):
            repeat = self._repeat(r, run)
            if repeat is None:
                return None
            repeats.append(repeat)
        try:
            whole = RepeatedProblems(self.numbers, tuple(repeats))
        except ProblemError:  # a block is joined to others in a way that copies cannot be
            return None
        return Repeated(self.folded, self.problem, whole, self.group_of)

    def _groups_repeat(self) -> bool:
        """Do groups repeat with the blocks, and is no parameter shared by blocks?

        The group of a copied operator must begin in its own block or in the one before, or be one
        group for all blocks.
        """
        for r, run in enumerate(self.folded.runs):
            for offset in range(run.period):
                _, copied, last = places_of(self.folded, run, offset)
                place = self.places[self.group_of[copied]]
                if place is None and self.group_of[copied] == self.group_of[last]:
                    continue
                if place not in ((r, _COPIED), (r, _FIRST)):
                    return False
                if place == (r, _FIRST) and self.places[self.group_of[last]] != (r, _COPIED):
                    return False
        shared = set(self.problem.parameter_variables.values())
        return not any(self._blocks_read(v) for v in shared)

    def _blocks_read(self, v: int) -> bool:
        """Do several blocks of a run read a parameter?"""
        places = {self.places[g] for g in self._groups_of[v]} - {None}
        return len(places) > 1

    @cached_property
    def _groups_of(self) -> list[frozenset[int]]:
        """Per variable, its groups: itself if it is a group, else all groups that read it."""
        n = len(self.numbers.sizes)
        readers: dict[int, list[int]] = {}
        for edge in self.numbers.edges:
            readers.setdefault(edge.u, []).append(edge.v)

        return [_reader_groups(v, len(self.members), readers) for v in range(n)]

    @cached_property
    def places(self) -> list[Place]:
        """The place of every variable."""
        of_groups = [self.folded.block_of(members[0]) for members in self.members]
        kept = [self._kept_block(place) for place in of_groups]
        out: list[Place] = []
        for groups in self._groups_of:
            places = {kept[g] for g in groups}
            out.append(places.pop() if len(places) == 1 else None)
        return out

    def _kept_block(self, place: tuple[int, int] | None) -> Place:
        if place is None:
            return None
        r, block = place
        return r, block if block in (_FIRST, _COPIED) else _LAST

    def _repeat(self, r: int, run: Run) -> Repeat | None:
        block = tuple(v for v, place in enumerate(self.places) if place == (r, _COPIED))
        after = frozenset(v for v, place in enumerate(self.places) if place == (r, _LAST))
        like: dict[int, int] = {}
        for u in self._entry_variables(r):
            found = self._counterpart(u, run.period)
            if found is None or found not in block:
                return None
            like[u] = found
        # Copies must reach the last block through the variables that join them to each other.
        handed_on = {v for v, w in self._edges() if w in after and v in block}
        if not handed_on <= set(like.values()):
            return None
        return Repeat(block, like, after, run.count - 2)

    def _entry_variables(self, r: int) -> set[int]:
        """The variables of the first block that are joined to the copied block."""
        first, copied = (r, _FIRST), (r, _COPIED)
        return {u for u, v in self._edges() if (self.places[u], self.places[v]) == (first, copied)}

    def _edges(self) -> Iterator[tuple[int, int]]:
        """Every edge, in both directions."""
        for edge in self.numbers.edges:
            yield edge.u, edge.v
            yield edge.v, edge.u

    def _counterpart(self, u: int, period: int) -> int | None:
        """The counterpart of group u one period later, if it has equal choices; else None."""
        if u >= len(self.members):
            return None
        moved = tuple(f + period for f in self.members[u])
        v = self.group_of.get(moved[0])
        if v is None or self.members[v] != moved:
            return None
        mine, theirs = self.problem.candidates[u], self.problem.candidates[v]
        same = all(
            a.distinct == b.distinct and np.array_equal(a.code, b.code)
            for a, b in (
                (mine.specs(x), theirs.specs(y))
                for x, y in zip(
                    _group_outputs(mine.group), _group_outputs(theirs.group), strict=True
                )
            )
        )
        return v if same else None


def _group_outputs(group: OperatorGroup) -> list[str]:
    """The values that a group makes, in order."""
    return [name for member in group.members for name in member.operator.outputs]


def _reader_groups(v: int, n_groups: int, readers: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Variable v if it is a group, else the groups that read it."""
    if v < n_groups:
        return frozenset((v,))
    return frozenset().union(*(_reader_groups(r, n_groups, readers) for r in readers.get(v, ())))
