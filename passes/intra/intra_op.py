"""Intra-operator parallelism as a choice problem: of one program, on logical meshes, with a number
of microbatches.

    candidates -> problem -> solver -> `Strategy`           (`choose.py` has the latter two)

The problems of several meshes and numbers of microbatches are built at once (`cases.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from autopar.cost.laws import CostModel
from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.errors import BatchError
from autopar.passes.analysis import FIRST_COUNT, Analysis, Recomputable, is_searched
from autopar.passes.intra.candidates import CandidateMaker
from autopar.passes.intra.cases import Case, Cases
from autopar.passes.intra.constraints import AppliedConstraints, Constraints
from autopar.passes.intra.member_prices import operator_times_s
from autopar.passes.intra.parameters import ParameterMaker
from autopar.passes.intra.priced import PlacedCosts, Priced
from autopar.passes.intra.problem import IntraOpProblem, IntraOpProblems, ProblemBuilder
from autopar.passes.intra.recompute_choice import add_recompute
from autopar.passes.reshard import ReshardTable, SpecColumns, priced_alike
from autopar.rules import rule_for

Array = NDArray[np.float64]
# Built at once, so that arrays stay small enough to be kept: about 1 MB each, and few cases are
# built that nobody asks for; with recompute, whose problems are several times as large, fewer, and
# of one stage, for which few numbers of microbatches are tried with it, fewer still.
MOST_CASES, MOST_CASES_AGAIN, MOST_CASES_OF_ONE = 72, 32, 8


def static_bytes(analysis: Analysis, dtype: torch.dtype, optimizer: str) -> float:
    """All parameters, with gradients and the optimizer's state of those that learn."""
    types = analysis.types.tensors
    static = static_bytes_per_param(optimizer, dtype).total_bytes
    return sum(
        types[n].size_bytes
        / types[n].itemsize
        * (static if types[n].has_grad else types[n].itemsize)
        for n in analysis.program.parameters
    )


def least_bytes(
    analysis: Analysis, cost: CostModel, n_microbatches: int, optimizer: str,
    constraints: Constraints, n_in_flight: int = 1, recomputable: Recomputable | None = None,
) -> float:  # fmt: skip
    """What a device needs at least, had every tensor a share on every rank that may share it, and
    ran everything again that may.

    Costs nothing beside solving, and rules out most numbers of microbatches that do not fit.
    """
    parameters = static_bytes(analysis, cost.dtype, optimizer)
    again = recomputable.operators_within(analysis) if recomputable else frozenset()
    kept = n_in_flight * analysis.kept_bytes(n_microbatches, again)
    return parameters / constraints.n_static_shares(cost.mesh.sizes) + kept / cost.mesh.n_ranks


def least_step_s(analysis: Analysis, cost: CostModel) -> float:
    """What no plan is faster than on as many devices: every operator of the whole batch as one, in
    equal shares, without a collective, an update or a wait."""
    n_accumulated, (times_s, _) = analysis.batch.n_accumulated, least_times_s(analysis, cost)
    return float(sum(times_s.tolist())) * n_accumulated / cost.mesh.n_ranks


def least_times_s(analysis: Analysis, cost: CostModel) -> Array:
    """[2, operators]: seconds on one device with the program's batch as one, and what of them a
    share of it takes as well, however small, for its launches."""
    types, alike = analysis.types.tensors, dict[int, Array]()
    for kind, item in analysis.placed_alike(analysis.batch.n_accumulated).items():
        operator = item.operator
        rule = rule_for(str(operator.call.op))
        moved = sum(types[n].size_bytes for n in (*operator.inputs, *operator.outputs))
        forward, backward = operator_times_s(
            rule, operator, types.__getitem__, cost,
            np.array([float(rule.flops_of(item.sizes)), 0.0]), np.array([float(moved), 0.0]),
        )  # fmt: skip
        alike[kind] = forward + backward
    return np.stack([alike[analysis.kinds[o.name]] for o in analysis.operators], axis=1)


def intra_op_problem(
    analysis: Analysis,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
    recomputable: Recomputable | None = None,
) -> IntraOpProblem:
    """The choice problem of a program, whole or of one stage, on one logical mesh.

    `n_like` counts operators that some stand for within their group (`placed_once`);
    `recomputable` is what may run again in backward.
    """
    case = (cost, n_microbatches)
    found = intra_op_problems(analysis, (case,), constraints, optimizer, n_like, recomputable)
    return found.of(0)


def intra_op_problems(
    analysis: Analysis,
    cases: Sequence[Case],
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
    recomputable: Recomputable | None = None,
) -> IntraOpProblems:
    """`intra_op_problem` in several cases, whose meshes use the same axes of the same devices, and
    whose numbers of microbatches are alike (`alike_counts`)."""
    program = analysis.program
    every = tuple((cost.for_parameters(analysis.parameter_bytes), m) for cost, m in cases)
    counts = tuple(dict.fromkeys(m for _, m in every))
    types = {m: analysis.microbatch_types(m) for m in counts}
    first = types[counts[0]]
    limits = AppliedConstraints.of(
        constraints, program, analysis.batch.cells, first.classes, analysis.matrices
    )
    stacked = Cases(
        every,
        {m: of_count.tensors for m, of_count in types.items()},
        {m: analysis.batch.n_splits(m) for m in counts},
    )
    priced = _priced(analysis, stacked, constraints, optimizer)
    sizes_at = [analysis.notation_sizes(m) for m in counts]
    columns = analysis.priced.setdefault("columns", SpecColumns())
    maker = CandidateMaker(
        stacked, sizes_at, analysis.saved, limits, n_like or {}, priced.groups,
        priced.placed.groups, columns,
    )  # fmt: skip
    savers: set[str] = set()
    candidates = [maker.make(group, savers) for group in analysis.groups(counts[0])]
    device, dtype = every[0][0].mesh.device, every[0][0].dtype
    static = static_bytes_per_param(optimizer, dtype)
    # Many tensors are updated in one launch, so each pays for its elements alone.
    update = optimizer_time_s(1.0, optimizer, dtype, device, n_tensors=0) / dtype.itemsize
    parameters = ParameterMaker(stacked, limits, static, update)
    builder = ProblemBuilder(program, stacked, parameters, priced)
    builder.connect(candidates)
    if recomputable is not None:
        add_recompute(builder, candidates, maker, analysis, recomputable)
    return builder.finished(candidates)


def _priced(analysis: Analysis, cases: Cases, constraints: Constraints, optimizer: str) -> Priced:
    """What is known of some cases."""
    known, limits = analysis.priced, repr(constraints)
    sizes = tuple((cost.mesh.sizes, m) for cost, m in cases.every)
    placed = known.setdefault(("placed", sizes, limits), PlacedCosts())
    meshes = cases.alike
    alike = meshes, tuple(cases.mesh_of.tolist()), cases.counts
    tables = known.setdefault(("values", alike), {}), known.setdefault(("parameters", meshes), {})
    buckets = tuple(cost.bucket_bytes for cost in cases.costs)
    key = ("priced", alike, buckets, limits, optimizer)
    found: Priced = known.setdefault(key, Priced(placed, *tables))
    return found


def alike_counts(analysis: Analysis, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Numbers of microbatches whose groups have the same strategies, together; without those that
    do not divide the batch."""
    found: list[list[int]] = []
    for m in counts:
        try:
            analysis.microbatch_types(m)
        except BatchError:
            continue
        for of in found:
            if _same_strategies(analysis, of[0], m):
                of.append(m)
                break
        else:
            found.append([m])
    return [tuple(of) for of in found]


def _same_strategies(analysis: Analysis, m: int, n: int) -> bool:
    """Have all operators the same strategies on one axis, whether m or n are the microbatches?"""
    alike = analysis.placed_alike(n)
    return all(
        item.strategies == alike[kind].strategies for kind, item in analysis.placed_alike(m).items()
    )


@dataclass(eq=False)
class ProblemFamilies:
    """The problems of one program. Of the cost models of one family, those that are asked for
    together have theirs built together (`_kind`), for several of the `counts` of microbatches, when
    the first of them is asked for.

    `n_like` gives `intra_op_problems`'s for a number of microbatches, `recomputable` is its. The
    last `most_kept` that were built are kept.
    """

    analysis: Analysis
    optimizer: str
    families: Sequence[tuple[CostModel, ...]] = ()
    counts: Sequence[int] = ()
    n_like: Callable[[int], Mapping[str, int]] = lambda m: {}
    recomputable: Recomputable | None = None
    most_kept: float = math.inf
    _built: dict[object, ProblemBatch] = field(default_factory=dict)
    _starts: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def _families(self) -> list[dict[CostModel, None]]:
        """Whatever is priced alike once."""
        return [dict.fromkeys(map(priced_alike, family)) for family in self.families]

    @cached_property
    def _together(self) -> list[dict[Hashable, tuple[CostModel, ...]]]:
        """Per family, its cost models of each kind."""
        kinds = [dict.fromkeys(map(self._kind, family)) for family in self._families]
        return [
            {kind: tuple(c for c in family if self._kind(c) == kind) for kind in of}
            for family, of in zip(self._families, kinds, strict=True)
        ]

    def _kind(self, cost: CostModel) -> tuple[tuple[int, ...], bool]:
        """The axes that a mesh uses, and whether it has all ranks, as one stage has, or fewer."""
        return cost.mesh.active_axes, cost.mesh.n_ranks >= self._n_ranks

    @cached_property
    def _n_ranks(self) -> int:
        return max((c.mesh.n_ranks for family in self.families for c in family), default=1)

    @cached_property
    def _alike(self) -> list[tuple[int, ...]]:
        return alike_counts(self.analysis, self.counts)

    def of(self, cost: CostModel, n_microbatches: int, constraints: Constraints) -> ProblemBatch:
        """The problems built with that of `cost` and so many microbatches, which they hold.

        Raises `InfeasibleError` where the constraints leave nothing in any of the cases,
        `BatchError` where the batch does not divide.
        """
        cost, kind = priced_alike(cost), self._kind(cost)
        every = [of.get(kind, ()) for of in self._together]
        costs = next((of for of in every if cost in of), (cost,))
        if constraints.pins or set(constraints.roles) == {"data"}:
            costs = (cost,)  # pins are of one mesh; to data parallelism all meshes are the same
        # As many for all families: their problems offer the same choices.
        n_most = max(map(len, (*every, costs)))
        _, is_whole = kind
        n_cases = self._most_cases(is_whole)
        first = 1 if is_whole else FIRST_COUNT
        counts = self._counts_with(n_microbatches, first, max(1, n_cases // n_most))
        key = (costs, counts, repr(constraints))
        if key not in self._built:
            cases = tuple((c, m) for m in counts for c in costs)
            problems = intra_op_problems(
                self.analysis, cases, constraints, self.optimizer, self.n_like(n_microbatches),
                self.recomputable,
            )  # fmt: skip
            self._built[key] = ProblemBatch(cases, problems)
            if len(self._built) > self.most_kept:
                del self._built[next(iter(self._built))]
        return self._built[key]

    def _most_cases(self, is_whole: bool) -> int:
        if self.recomputable is None:
            return MOST_CASES
        is_one = is_whole and is_searched(self.recomputable)
        return MOST_CASES_OF_ONE if is_one else MOST_CASES_AGAIN

    def _counts_with(self, n_microbatches: int, first: int, n_most: int) -> tuple[int, ...]:
        """The numbers of microbatches that are built with one; fewer than `first` apart, where not
        all can be built at once.

        Parts of a program are built for the same numbers, so that they share what is priced. Where
        recompute is searched, parts are built alone; the numbers begin with the first asked for.
        """
        for alike in self._alike:
            if n_microbatches in alike:
                near = alike
                if len(alike) > n_most:
                    near = tuple(m for m in alike if (m < first) == (n_microbatches < first))
                at, start = near.index(n_microbatches), 0
                if is_searched(self.recomputable):
                    start = self._starts.setdefault((near, n_most), at)
                start += (at - start) // n_most * n_most
                return near[max(start, 0) : start + n_most]
        return (n_microbatches,)


@dataclass(frozen=True, eq=False)
class ProblemBatch:
    """Problems that were built together, by cost model and number of microbatches: cost models that
    price alike have one."""

    cases: tuple[Case, ...]
    problems: IntraOpProblems
    _of: dict[Case, IntraOpProblem] = field(default_factory=dict)

    def place(self, cost: CostModel, n_microbatches: int) -> int:
        """Where a case is among the problems."""
        return self.cases.index((priced_alike(cost), n_microbatches))

    def of(self, cost: CostModel, n_microbatches: int) -> IntraOpProblem:
        case = (priced_alike(cost), n_microbatches)
        if case not in self._of:
            self._of[case] = self.problems.of(self.cases.index(case))
        return self._of[case]

    def table(self, value: str, cost: CostModel, n_microbatches: int) -> ReshardTable:
        """The reshards of a value that is no parameter, as they were priced."""
        return self.problems.tables_of(value).of(self.place(cost, n_microbatches))
