"""Intra-operator parallelism as choice problems: one program, on logical meshes, with numbers of
microbatches.

    candidates -> problem -> solver -> `Strategy`           (`chooser.py` has the last two steps)

The problems of several meshes and numbers of microbatches are built at once (`cases.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.cost.hardware import attention_flops_per_s
from autopar.cost.laws import CostModel
from autopar.cost.memory import static_bytes_per_param, update_time_s
from autopar.cost.price import slowdown_of
from autopar.errors import BatchError
from autopar.passes.analysis import Analysis, Recomputable, is_searched, stored_dtype
from autopar.passes.intra.at_loss import AtLoss
from autopar.passes.intra.builder import ProblemBuilder
from autopar.passes.intra.candidates import CandidateMaker
from autopar.passes.intra.cases import Case, Cases
from autopar.passes.intra.constraints import AppliedConstraints, Constraints
from autopar.passes.intra.hiding import NOTHING_HIDDEN, Hiding
from autopar.passes.intra.member_prices import MemberPricer
from autopar.passes.intra.parameters import ParameterMaker
from autopar.passes.intra.priced import Prices
from autopar.passes.intra.problem import IntraOpProblem, IntraOpProblems
from autopar.passes.intra.recompute_choice import add_recompute
from autopar.passes.reshard import canonical_cost
from autopar.rules import rule_for

# The most cases built at once. 72 keeps arrays at about 1 MB, small enough to cache. Of stages, and
# with searched recompute, few are requested, and the latter are several times as large.
MOST_CASES, FEW_CASES = 72, 8
# Problems with more axes in use are built alone: they are large, and few are requested.
MOST_BATCHED_AXES = 2
# Pipelines mostly have at least so many: m = 8p keeps the bubble (p - 1) / m of p stages below 1/8.
FIRST_COUNT = 16


def intra_op_problem(
    analysis: Analysis,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
    recomputable: Recomputable | None = None,
    prices: Prices | None = None,
) -> IntraOpProblem:
    """The choice problem of a program (whole or one stage) on one logical mesh.

    `n_like` maps operator -> how many operators it stands for within its group (`placed_once`).
    `recomputable` is what may run again in backward. `prices` is what problems of the same program,
    or of its parts, share.
    """
    case = (cost, n_microbatches)
    found = intra_op_problems(
        analysis, (case,), constraints, optimizer, n_like, recomputable, prices
    )
    return found.of(0)


def intra_op_problems(
    analysis: Analysis,
    cases: Sequence[Case],
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
    recomputable: Recomputable | None = None,
    prices: Prices | None = None,
) -> IntraOpProblems:
    """`intra_op_problem` in several cases.

    Their meshes use the same axes of the same devices. Their numbers of microbatches offer the same
    strategies (`alike_counts`).
    """
    program = analysis.program
    every = tuple((cost.limit_buckets(analysis.parameter_bytes), m) for cost, m in cases)
    counts = tuple(dict.fromkeys(m for _, m in every))
    types = {m: analysis.microbatch_types(m) for m in counts}
    first = types[counts[0]]
    limits = AppliedConstraints.of(
        constraints, program, analysis.batch.cells, first.classes, analysis.parameter_views
    )
    stacked = Cases(
        every,
        {m: of_count.tensors for m, of_count in types.items()},
        {m: analysis.batch.n_splits(m) for m in counts},
    )
    at_loss = AtLoss.of(analysis, stacked)
    prices = prices or Prices()
    priced = prices.of(stacked, constraints, optimizer, at_loss)
    sizes_at = [analysis.notation_sizes(m) for m in counts]
    pricer = MemberPricer(
        stacked, sizes_at, analysis.saved, analysis.kept_owners, limits.batch_cells,
        limits.parameters, at_loss, analysis.fused_traffic(every[0][0].kernels),
    )  # fmt: skip
    tables = priced.groups, priced.placed.groups
    maker = CandidateMaker(pricer, limits, n_like or {}, *tables, prices.columns)
    savers: set[str] = set()
    candidates = [maker.make(group, savers) for group in analysis.groups(counts[0])]
    machine, dtype = every[0][0], stored_dtype(analysis)
    static = static_bytes_per_param(optimizer, dtype)
    # The optimizer updates all tensors of a dtype at once, so a tensor pays for its elements alone.
    on = machine.mesh.device, machine.runs
    update = update_time_s(1.0, optimizer, dtype, *on, n_tensors=0) / dtype.itemsize
    dtypes = {info.dtype for info in program.parameters.values() if info.requires_grad}
    launches_s = math.fsum(update_time_s(0.0, optimizer, of, *on) for of in dtypes)
    hiding = NOTHING_HIDDEN
    if machine.hides:
        share = backward_share(analysis, machine, recomputable is not None)
        hiding = Hiding.of(slowdown_of(machine), share)
    counted = np.array(at_loss.gradients, dtype=np.float64)
    parameters = ParameterMaker(
        stacked, limits, static, update, hiding, analysis.gathering, counted
    )
    builder = ProblemBuilder(program, stacked, parameters, priced, launches_s)
    builder.connect(candidates)
    if recomputable is not None:
        add_recompute(builder, candidates, maker, analysis, recomputable)
    return builder.finish(candidates)


def backward_share(analysis: Analysis, cost: CostModel, recomputes: bool) -> float:
    """The most of a microbatch's compute that its backward takes (`operator_times_s`).

    A backward takes at most twice its forward, that of fused attention by its rates; with recompute
    its forward, too.
    """
    ratio = 2.0
    if any(rule_for(str(operator.call.op)).fused for operator in analysis.operators):
        forward, backward = attention_flops_per_s(cost.mesh.device, cost.dtype)
        ratio = max(ratio, 2.5 * forward / backward)
    return (ratio + recomputes) / (1 + ratio + recomputes)


def alike_counts(analysis: Analysis, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Group the numbers of microbatches under which operators have the same strategies.

    Numbers that do not divide the batch are left out.
    """
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
    """Do all operators have the same strategies on one axis for m as for n microbatches?"""
    alike = analysis.placed_by_kind(n)
    return all(
        item.strategies == alike[kind].strategies
        for kind, item in analysis.placed_by_kind(m).items()
    )


@dataclass(eq=False)
class ProblemFamilies:
    """The problems of one program, built in batches on demand.

    A request builds the problems of all cost models of the same family and kind (`_kind`), for
    several of the `counts` of microbatches. `n_like` maps a number of microbatches to the `n_like`
    of `intra_op_problems`. The last `most_kept` batches are kept.
    """

    analysis: Analysis
    optimizer: str
    families: Sequence[tuple[CostModel, ...]] = ()
    counts: Sequence[int] = ()
    n_like: Callable[[int], Mapping[str, int]] = lambda m: {}
    recomputable: Recomputable | None = None
    most_kept: float = math.inf
    prices: Prices = field(default_factory=Prices)
    _built: dict[object, ProblemBatch] = field(default_factory=dict)
    _starts: dict[Hashable, int] = field(default_factory=dict)

    @cached_property
    def _families(self) -> list[dict[CostModel, None]]:
        """The families; cost models with equal prices appear once."""
        return [dict.fromkeys(map(canonical_cost, family)) for family in self.families]

    @cached_property
    def _family_kinds(self) -> list[dict[Hashable, tuple[CostModel, ...]]]:
        """Per family: kind -> its cost models."""
        kinds = [dict.fromkeys(map(self._kind, family)) for family in self._families]
        return [
            {kind: tuple(c for c in family if self._kind(c) == kind) for kind in of}
            for family, of in zip(self._families, kinds, strict=True)
        ]

    def _kind(self, cost: CostModel) -> tuple[tuple[int, ...], int]:
        """The axes that a mesh uses, and how many ranks it has."""
        return cost.mesh.active_axes, cost.mesh.n_ranks

    @cached_property
    def _n_ranks(self) -> int:
        return max((c.mesh.n_ranks for family in self.families for c in family), default=1)

    @cached_property
    def _alike(self) -> list[tuple[int, ...]]:
        return alike_counts(self.analysis, self.counts)

    def of(self, cost: CostModel, n_microbatches: int, constraints: Constraints) -> ProblemBatch:
        """The batch that holds the problem of `cost` with that many microbatches.

        Raises `InfeasibleError` if the constraints leave nothing in any of the cases, `BatchError`
        if the batch does not divide.
        """
        cost, kind = canonical_cost(cost), self._kind(cost)
        every = [of.get(kind, ()) for of in self._family_kinds]
        costs = next((of for of in every if cost in of), (cost,))
        is_wide = len(cost.mesh.active_axes) > MOST_BATCHED_AXES
        if constraints.pins or set(constraints.roles) == {"data"} or is_wide:
            costs = (cost,)  # pins are of one mesh; for pure data parallelism all meshes are equal
        # Equally many counts for all families, so that their problems offer the same choices.
        n_most = MOST_CASES if is_wide else max(map(len, (*every, costs)))
        is_whole = cost.mesh.n_ranks >= self._n_ranks
        is_few = not is_whole or is_searched(self.recomputable)
        n_cases = FEW_CASES if is_few else MOST_CASES
        first = 1 if is_whole else FIRST_COUNT
        counts = self._batch_counts(n_microbatches, first, max(1, n_cases // n_most))
        key = (costs, counts, repr(constraints))
        if key not in self._built:
            cases = tuple((c, m) for m in counts for c in costs)
            problems = intra_op_problems(
                self.analysis, cases, constraints, self.optimizer, self.n_like(n_microbatches),
                self.recomputable, self.prices,
            )  # fmt: skip
            self._built[key] = ProblemBatch(cases, problems)
            if len(self._built) > self.most_kept:
                del self._built[next(iter(self._built))]
        return self._built[key]

    def _batch_counts(self, n_microbatches: int, first: int, n_most: int) -> tuple[int, ...]:
        """The numbers of microbatches that are built together with `n_microbatches`.

        If they cannot all be built at once, numbers below `first` are built apart. Stages start
        their batches at the same numbers, so that they share prices. If recompute is searched,
        stages are built alone and batches start at the first requested number.
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
    """Problems that were built together; cost models with equal prices share one problem."""

    cases: tuple[Case, ...]
    problems: IntraOpProblems
    _of: dict[Case, IntraOpProblem] = field(default_factory=dict)

    def place(self, cost: CostModel, n_microbatches: int) -> int:
        """The index of a case among the problems."""
        return self.cases.index((canonical_cost(cost), n_microbatches))

    def of(self, cost: CostModel, n_microbatches: int) -> IntraOpProblem:
        case = (canonical_cost(cost), n_microbatches)
        if case not in self._of:
            self._of[case] = self.problems.of(self.cases.index(case))
        return self._of[case]
