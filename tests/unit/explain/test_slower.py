"""What makes a candidate slower: the part of its step that grew most, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

import autopar
from autopar import Manual, Mesh, Plan
from autopar.cost.price import exposed_calls
from autopar.passes.search import PlanningResult, Simulator, Solved, WhySlower
from autopar.program.lines import CallLine, Pipeline
from tests.helpers.jobs import CASES, gpt2
from tests.helpers.plans import bound_of, pipeline_of


@dataclass(frozen=True)
class Lowered:
    """What is asked of a simulator: pipelines, here of two plans."""

    pipelines: Sequence[tuple[Solved, Pipeline]]

    def pipeline(self, stages: Any, schedule: str) -> Pipeline:
        return next(of for one, of in self.pipelines if one.stages is stages)


def solved(plan: Plan) -> Solved:
    return bound_of(plan).compilation[PlanningResult].solved


def planned(manual: Manual, recompute: str = "none") -> Plan:
    mesh = Mesh((2, 2), hardware="cpu-local")
    return autopar.plan(gpt2(4), mesh, CASES["gpt2"].batch(0), manual=manual, recompute=recompute)


@pytest.fixture(scope="module")
def fast() -> Plan:
    return planned(Manual(dp=4))


def why(slow: Plan, fast: Plan) -> str:
    lowered = Lowered([(solved(slow), pipeline_of(slow)), (solved(fast), pipeline_of(fast))])
    why, one = WhySlower(cast(Simulator, lowered), solved(fast), cast(Any, None)), solved(slow)
    return why.reason(one, pipeline_of(slow), [stage.cost for stage in one.stages], slow.simulate())


def test_nothing_is_slower_than_itself(fast: Plan) -> None:
    assert why(fast, fast) == ""


def test_recompute(fast: Plan) -> None:
    assert why(planned(Manual(dp=4), "full"), fast) == "recompute"


@pytest.mark.parametrize(
    ("manual", "collective"),
    [
        (Manual(tp=4), "all_reduce across nodes"),
        (Manual(dp=2, tp=2), "all_reduce"),
        (Manual(dp=4, zero=3), "all_gather across nodes"),
        (Manual(pp=4), "bubble"),
    ],
)
def test_communication_is_named_with_its_links_and_the_bubble(
    manual: Manual, collective: str, fast: Plan
) -> None:
    assert why(planned(manual), fast) == collective


@pytest.mark.parametrize("manual", [Manual(dp=4), Manual(dp=2, tp=2), Manual(dp=4, zero=3)])
def test_exposed_calls_are_what_a_step_waits_for(manual: Manual) -> None:
    plan = planned(manual)
    step = plan.simulate()
    calls = exposed_calls(pipeline_of(plan), [stage.cost for stage in solved(plan).stages], step)
    assert sum(call.time_s for call in calls) == pytest.approx(step.busiest.collectives_s)
    assert [call.time_s for call in calls] == sorted((c.time_s for c in calls), reverse=True)


@pytest.mark.parametrize(("part", "field"), [("bubble", ""), ("optimizer", "optimizer_time_s")])
def test_other_parts(part: str, field: str, fast: Plan) -> None:
    """A step that is longer by one part."""
    one = solved(fast)
    more = {field: 1.0 + getattr(one.predicted, field)} if field else {}
    longer = replace(one.predicted, step_time_s=one.predicted.step_time_s + 1.0, **more)
    explained = WhySlower(cast(Simulator, None), one, cast(Any, None))
    slow = replace(one, predicted=longer)
    assert explained.reason(slow, pipeline_of(fast), [], cast(Any, None)) == part


@pytest.mark.parametrize(
    ("of_matmuls", "time_factor", "flops_factor", "said"),
    [
        (True, 3.0, 1.0, "less efficient matmuls"),
        (True, 3.0, 2.0, "matmuls that several ranks repeat"),
        (False, 3.0, 1.0, "operators other than matmuls"),
    ],
)
def test_compute(
    of_matmuls: bool, time_factor: float, flops_factor: float, said: str, fast: Plan
) -> None:
    """A program whose matmuls, or whose other operators, take longer."""
    one, of = solved(fast), pipeline_of(fast)
    (program,) = of.stages
    body = tuple(
        replace(
            line, forward_s=time_factor * line.forward_s, flops=flops_factor * line.flops
        )
        if isinstance(line, CallLine) and bool(line.flops) == of_matmuls else line
        for line in program.body
    )  # fmt: skip
    predicted = replace(
        one.predicted, step_time_s=one.predicted.step_time_s + 1.0,
        compute_time_s=one.predicted.compute_time_s + 1.0,
    )  # fmt: skip
    slow = replace(one, predicted=predicted, stages=tuple(map(replace, one.stages)))
    changed = replace(of, stages=(replace(program, body=body),))
    lowered = cast(Simulator, Lowered([(slow, changed), (one, of)]))
    why = WhySlower(lowered, one, cast(Any, None))
    assert why.reason(slow, changed, [], cast(Any, None)) == said
