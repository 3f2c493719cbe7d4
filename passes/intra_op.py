"""Intra-operator parallelism as a choice problem: of one program, on logical meshes, with a number
of microbatches.

    candidates -> problem -> solver -> `Strategy`           (`choose.py` has the latter two)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.cost.model import CostModel
from autopar.passes.analysis import Analysis
from autopar.passes.candidates import CandidateMaker
from autopar.passes.constraints import Constraints, Limits
from autopar.passes.parameters import ParameterMaker
from autopar.passes.priced import Priced
from autopar.passes.problem import IntraOpProblem, IntraOpProblems, ProblemBuilder
from autopar.passes.reshard import priced_alike


def least_bytes(
    analysis: Analysis, cost: CostModel, n_microbatches: int, optimizer: str, n_in_flight: int = 1
) -> float:
    """What a device needs at least, had every tensor a share on every rank.

    Costs nothing beside solving, and rules out most numbers of microbatches that do not fit.
    """
    types, n_ranks = analysis.microbatch_types(n_microbatches).tensors, cost.mesh.n_ranks
    kept: set[str] = set()
    other_bytes = 0.0
    for operator in analysis.operators:
        saved = analysis.saved.get(operator.name)
        if saved is None:
            continue
        kept |= {operator.inputs[i] for i in saved.inputs}
        kept |= {operator.outputs[i] for i in saved.outputs}
        other_bytes += saved.other_bytes / analysis.batch.n_splits(n_microbatches)
    activations = sum(types[n].size_bytes for n in kept - set(analysis.program.parameters))
    static = static_bytes_per_param(optimizer, cost.dtype).total_bytes
    parameters = sum(
        types[n].size_bytes
        / types[n].itemsize
        * (static if types[n].has_grad else types[n].itemsize)
        for n in analysis.program.parameters
    )
    return (parameters + n_in_flight * (activations + other_bytes)) / n_ranks


def intra_op_problem(
    analysis: Analysis,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
) -> IntraOpProblem:
    """The choice problem of a program, whole or of one stage, on one logical mesh.

    `n_like` counts operators that some stand for within their group (`placed_once`).
    """
    problems = intra_op_problems(analysis, (cost,), n_microbatches, constraints, optimizer, n_like)
    return problems.of(0)


def intra_op_problems(
    analysis: Analysis,
    costs: Sequence[CostModel],
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    n_like: Mapping[str, int] | None = None,
) -> IntraOpProblems:
    """`intra_op_problem` on logical meshes that use the same axes of the same devices."""
    program = analysis.program
    types = analysis.microbatch_types(n_microbatches)
    costs = tuple(cost.for_parameters(analysis.parameter_bytes) for cost in costs)
    alike = tuple((priced_alike(cost), cost.bucket_bytes) for cost in costs)
    key = (alike, n_microbatches, repr(constraints), optimizer)
    priced = analysis.priced.setdefault(key, Priced())
    limits = Limits.of(constraints, program, analysis.batch.cells, types.classes, analysis.matrices)
    n_splits = analysis.batch.n_splits(n_microbatches)
    maker = CandidateMaker(
        costs, types.tensors, analysis.saved, limits, n_microbatches, n_splits, n_like or {},
        priced.groups,
    )  # fmt: skip
    savers: set[str] = set()
    candidates = [maker.make(group, savers) for group in analysis.groups(n_microbatches)]
    device, dtype = costs[0].mesh.device, costs[0].dtype
    static = static_bytes_per_param(optimizer, dtype)
    # Many tensors are updated in one launch, so each pays for its elements alone.
    update = optimizer_time_s(1.0, optimizer, dtype, device, n_tensors=0) / dtype.itemsize
    parameters = ParameterMaker(costs, limits, n_microbatches, static, update)
    return ProblemBuilder(program, types.tensors, parameters, priced).build(candidates)


@dataclass(eq=False)
class ProblemFamilies:
    """The problems of one program. Of the cost models of one family, those whose meshes use the
    same axes have theirs built together, when the first of them is asked for.

    `n_like` gives `intra_op_problems`'s for a number of microbatches.
    """

    analysis: Analysis
    optimizer: str
    families: Sequence[tuple[CostModel, ...]] = ()
    n_like: Callable[[int], Mapping[str, int]] = lambda m: {}
    _built: dict[object, ProblemBatch] = field(default_factory=dict)

    @cached_property
    def _families(self) -> list[dict[CostModel, None]]:
        """Whatever is priced alike once."""
        return [dict.fromkeys(map(priced_alike, family)) for family in self.families]

    def of(self, cost: CostModel, n_microbatches: int, constraints: Constraints) -> ProblemBatch:
        """The problems built with that of `cost`, which they hold.

        Raises `InfeasibleError` where the constraints leave nothing on any of the meshes,
        `BatchError` where the batch does not divide.
        """
        cost = priced_alike(cost)
        family = next((f for f in self._families if cost in f), (cost,))
        costs = tuple(c for c in family if c.mesh.active_axes == cost.mesh.active_axes)
        if constraints.pins or set(constraints.roles) == {"data"}:
            costs = (cost,)  # pins are of one mesh; to data parallelism all meshes are the same
        key = (costs, n_microbatches, repr(constraints))
        if key not in self._built:
            problems = intra_op_problems(
                self.analysis, costs, n_microbatches, constraints, self.optimizer,
                self.n_like(n_microbatches),
            )  # fmt: skip
            self._built[key] = ProblemBatch(costs, problems)
        return self._built[key]


@dataclass(frozen=True, eq=False)
class ProblemBatch:
    """Problems that were built together, by cost model: those that price alike have one."""

    costs: tuple[CostModel, ...]
    problems: IntraOpProblems
    _of: dict[CostModel, IntraOpProblem] = field(default_factory=dict)

    def __getitem__(self, cost: CostModel) -> IntraOpProblem:
        cost = priced_alike(cost)
        if cost not in self._of:
            self._of[cost] = self.problems.of(self.costs.index(cost))
        return self._of[cost]
