"""The intra-operator problem: every choice of a stage as one `ChoiceProblem`.

Variables:  one per group (its joint strategy), one per parameter (its storage), one per *reuse*
            (the shared placement of equal consumers of one tensor), and one per value that crosses
            to or from another stage
Costs:      on groups, compute; on parameters, the optimizer's update; on edges, reshards

    minimise  sum_v time[v][x_v] + sum_edges reshard[u, v][x_u, x_v]

Meshes with the same axes in use have the same variables and choices. Their problems are built
together (`builder.py`), and every array of numbers starts with an axis of cases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.arrays import BoolArray
from autopar.caching import once
from autopar.manual import Recompute
from autopar.passes.analysis import Side
from autopar.passes.intra.candidates import GroupCandidates
from autopar.passes.intra.hiding import NOTHING_HIDDEN, ExposureWeights, HidableCosts, Hiding
from autopar.passes.reshard import SpecColumn
from autopar.passes.solvers.problem import ChoiceProblem, ChoiceProblems, Numbers
from autopar.placement import Spec
from autopar.program.lines import Recomputed, Storage


@dataclass(frozen=True)
class RangeMode:
    """A range of consecutive operators and how it may run again; mode None: it does not.

    `variable` chooses among several modes; None if there is only one.
    """

    operators: tuple[str, ...]
    modes: tuple[Recompute | None, ...]
    variable: int | None

    def recomputed(self, choice: int | None) -> Recomputed | None:
        """The range in the mode that its variable chooses; None if it does not run again."""
        mode = self.modes[0 if choice is None else choice]
        return None if mode is None else Recomputed(mode, self.operators)


@dataclass(frozen=True)
class IntraOpProblem:
    """A choice problem, and what the choices of its variables mean.

    `hidable` maps the variable of a parameter to what compute may hide of its conversions;
    `may_be_last` to what all parameters wait at most for their last bucket (`slack_s`), as a
    multiple of its own sync. `waits_per_sync` is what a parameter that may be hidden waits for in
    that bucket on average, as a multiple of its sync. `launches_s` are of the optimizer in every
    step, and not among the numbers. `case` is the problem's place among those built with it, and
    `counts` are their microbatches.
    """

    numbers: ChoiceProblem
    candidates: tuple[GroupCandidates, ...]
    storages: Mapping[str, tuple[Storage, ...]]
    parameter_variables: Mapping[str, int]
    boundary_variables: Mapping[tuple[Side, str], int] = field(default_factory=dict)
    boundary_choices: Mapping[tuple[Side, str], SpecColumn] = field(default_factory=dict)
    modes: tuple[RangeMode, ...] = ()
    hiding: Hiding = NOTHING_HIDDEN
    counts: tuple[int, ...] = (1,)
    hidable: Mapping[int, HidableCosts] = field(default_factory=dict)
    may_be_last: Mapping[int, float] = field(default_factory=dict)
    waits_per_sync: float = 0.0
    launches_s: float = 0.0
    case: int = 0

    def under(self, budget_bytes: float | None, n_in_flight: float = 1) -> IntraOpProblem:
        """The problem with a budget, and activations of `n_in_flight` microbatches live at once."""
        numbers = self.numbers
        if n_in_flight != 1:
            stored = frozenset(self.parameter_variables.values())
            alone = replace(ChoiceProblems.of_one(numbers), stored=stored)
            numbers = Numbers.row(alone, 0, n_in_flight).problem(alone)
        return replace(self, numbers=replace(numbers, budget_bytes=budget_bytes))

    @property
    def structure(self) -> Hashable:
        """Equal for problems of one program that offer the same choices."""
        return tuple(c.table.likeness for c in self.candidates), tuple(self.storages.values())

    def is_once(self, numbers: ChoiceProblems, variables: Sequence[int]) -> BoolArray:
        """[numbers of a row]: which costs a step pays once, whatever its microbatches: updates and
        parameters that are converted once. `numbers` is of some of the variables."""
        layout = numbers.layout
        out = np.zeros(layout.n_numbers, dtype=bool)
        converted = {
            v: np.array([storage.period == "step" for storage in self.storages[name]])
            for name, v in self.parameter_variables.items()
        }
        for v, at, n in zip(variables, layout.own_at, layout.n_choices, strict=True):
            out[at : at + n] = v >= len(self.candidates)
        for edge, at in zip(numbers.edges, layout.table_at, strict=True):
            table = out[at : at + math.prod(edge.shape)].reshape(edge.shape)
            u, v = variables[edge.u], variables[edge.v]
            if u in converted:
                table[:] = converted[u][:, None]
            elif v in converted:
                table[:] = converted[v]
        return out

    @cached_property
    def runs_again(self) -> frozenset[int]:
        """The variables that choose what runs again; their costs and those of their edges are
        compute."""
        return frozenset(of.variable for of in self.modes if of.variable is not None)

    @once
    def slack_s(self, case: int) -> float:
        """How far a choice's objective is above its simulated step at most.

        Which gradients are in the last bucket is known on average (`Gathering.last_share`). If
        they are not, they may be hidden.
        """
        waits_s = (
            share * float(self.hidable[v](case).sync_s.max())
            for v, share in self.may_be_last.items()
        )
        return (1 - self.hiding.sync_price) * max(waits_s, default=0.0)

    def offset_s(self, case: int) -> float:
        """What makes a bound on the numbers one on the step, if it is added."""
        return self.launches_s - self.slack_s(case)

    @property
    def bound_weights(self) -> ExposureWeights:
        """The weights with which the numbers are a bound on the step without `slack_s`: what waits
        on average for the last bucket is hidden, too."""
        return ExposureWeights(0.0, 0.0, -(1 - self.hiding.sync_price) * self.waits_per_sync, 0.0)

    @property
    def computes(self) -> tuple[int, ...]:
        """The variables whose own costs are compute."""
        return (*range(len(self.candidates)), *sorted(self.runs_again))

    def boundaries(self, choice: Sequence[int], side: Side) -> dict[str, Spec]:
        """Value -> its spec, for the values that cross on one side."""
        return {
            value: self.boundary_choices[of, value][choice[index]]
            for (of, value), index in self.boundary_variables.items()
            if of == side
        }


@dataclass(frozen=True)
class IntraOpProblems:
    """The problems of a program in several cases; only the numbers of `IntraOpProblem` differ."""

    numbers: ChoiceProblems
    first: IntraOpProblem

    def of(self, case: int) -> IntraOpProblem:
        """The problem of one case."""
        return replace(self.first, numbers=self.numbers.of(case), case=case)
