"""Why a simulated candidate is slower than the best one: the part of a step that grew most.

    step = compute + exposed communication + idle + optimizer      of the busiest device

Communication is named by the collective that is waited for most, and by its links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.laws import CostModel
from autopar.cost.price import StepPricer, exposed_calls, summary_of
from autopar.cost.simulate import Timeline
from autopar.passes.search.evaluator import Proposal
from autopar.passes.search.simulator import Simulator, Solved
from autopar.plans import PlanSummary, Predicted
from autopar.program.lines import CallLine, Pipeline, line_counts

# FLOPs of two plans are equal up to this, relative.
_FLOPS_REL = 0.02


@dataclass(frozen=True)
class WhySlower:
    """Says why candidates are slower than the `fastest`."""

    simulator: Simulator
    fastest: Solved
    pricer: StepPricer

    def __call__(self, found: Solved | Proposal) -> tuple[str, PlanSummary]:
        """`all_reduce across nodes`, empty if no part of the step takes longer; and the summary.

        What was only solved is simulated so, within the budget or not.
        """
        slow = found if isinstance(found, Solved) else self.simulator.simulate_once(found)
        pipeline, costs = (
            self.simulator.pipeline(slow.stages, slow.candidate.schedule),
            [s.cost for s in slow.stages],
        )
        timeline = self.pricer.timeline(pipeline, costs)
        summary = summary_of(pipeline, costs, timeline, self.pricer.optimizer)
        return self.reason(slow, pipeline, costs, timeline), summary

    def reason(
        self, slow: Solved, pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline
    ) -> str:
        """What makes it slower; `pipeline` are its stages, `timeline` is a step of them."""
        own, best = _parts_s(slow.predicted), _parts_s(self.fastest.predicted)
        part = max(own, key=lambda name: own[name] - best[name])
        if own[part] <= best[part]:
            return ""
        if part not in ("communication", "compute"):
            return part
        if part == "communication":
            return _communication(pipeline, costs, timeline)
        if _recomputes(slow) and not _recomputes(self.fastest):
            return "recompute"
        return _compute(
            pipeline, self.simulator.pipeline(self.fastest.stages, self.fastest.candidate.schedule)
        )


def _compute(slow: Pipeline, fast: Pipeline) -> str:
    """Which operators take longer: those without FLOPs, or matmuls, more of them or slower ones."""
    own, best = _Work.of(slow), _Work.of(fast)
    if own.other_s - best.other_s > own.matmul_s - best.matmul_s:
        return "operators other than matmuls"
    more = own.flops > best.flops * (1 + _FLOPS_REL)
    return "matmuls that several ranks repeat" if more else "less efficient matmuls"


@dataclass(frozen=True)
class _Work:
    """Compute of all microbatches: seconds on the busiest stage, FLOPs of all ranks."""

    matmul_s: float
    other_s: float
    flops: float

    @staticmethod
    def of(pipeline: Pipeline) -> _Work:
        rows = []
        for program, mesh in zip(pipeline.stages, pipeline.meshes, strict=True):
            counted = zip(program.body, line_counts(program), strict=True)
            calls = [(x, n, n * (x.forward_s + x.backward_s)) for x, n in counted
                     if isinstance(x, CallLine)]  # fmt: skip
            rows.append((
                sum(time_s for x, _, time_s in calls if x.flops),
                sum(time_s for x, _, time_s in calls if not x.flops),
                mesh.n_ranks * sum(n * x.flops for x, n, _ in calls),
            ))  # fmt: skip
        matmul_s, other_s, _ = max(rows, key=lambda row: row[0] + row[1])
        m = pipeline.n_microbatches
        return _Work(m * matmul_s, m * other_s, m * sum(flops for _, _, flops in rows))


def _communication(pipeline: Pipeline, costs: Sequence[CostModel], timeline: Timeline) -> str:
    calls, totals = exposed_calls(pipeline, costs, timeline), timeline.busiest
    if not calls or totals.waited_s > calls[0].time_s:
        return "messages between stages"
    return f"{calls[0].kind} across nodes" if calls[0].crosses_nodes else calls[0].kind


def _parts_s(predicted: Predicted) -> dict[str, float]:
    """The parts of a step of the busiest device, in seconds; they add up to it."""
    compute_s, optimizer_s = predicted.compute_time_s, predicted.optimizer_time_s
    idle_s = predicted.step_time_s - compute_s - predicted.exposed_comm_s - optimizer_s
    return {
        "communication": predicted.exposed_comm_s, "compute": compute_s, "bubble": idle_s,
        "optimizer": optimizer_s,
    }  # fmt: skip


def _recomputes(solved: Solved) -> bool:
    return any(stage.strategy.recomputed for stage in solved.stages)
